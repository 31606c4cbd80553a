//! Connects to an address.

use super::command::execute;
use super::inherited::inherited;
use super::stream::Socket;
use super::{Address, HostPort};
use std::io;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a host may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Connects to `to`.
pub(super) fn dial(to: &Address) -> io::Result<Socket> {
    match to {
        Address::Unix(path) => UnixStream::connect(path).map(Socket::Unix),
        Address::Tcp(place) | Address::Tls(place) => connect(place).map(Socket::Tcp),
        Address::Fd(number) => inherited(*number),
        Address::Exec(command) => {
            execute(command).map(|(stream, end)| Socket::Command(stream, end))
        }
    }
}

/// Tries each address of the host.
fn connect(place: &HostPort) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (place.host.as_str(), place.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
