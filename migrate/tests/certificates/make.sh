#!/bin/sh
# Makes the certificates of these tests again: an authority with a certificate for this host, and
# one of another authority. The keys protect nothing.
set -eu
cd "$(dirname "$0")"
make() { # AUTHORITY NAME
    curve="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -sha256 -days 36500"
    openssl req -x509 $curve -subj "/CN=test authority $1" -keyout authority.tmp -out "$1.pem"
    openssl req -x509 $curve -subj "/CN=test $2" -keyout "$2.key" -out "$2.pem" \
        -CA "$1.pem" -CAkey authority.tmp -addext basicConstraints=critical,CA:FALSE \
        -addext subjectAltName=DNS:localhost,IP:127.0.0.1
    rm authority.tmp
}
make authority host
make stranger other
# A certificate of X.509 version 1, which has no names.
openssl req -new -key host.key -subj "/CN=test host" |
    openssl x509 -req -key host.key -days 36500 -out old.pem
