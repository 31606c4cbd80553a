//! Every behaviour on `/dev/kvm`.

lacuna_conformance::suite!(x86_64: lacuna_conformance::Kvm);
