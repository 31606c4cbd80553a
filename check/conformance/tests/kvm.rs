//! Every behaviour on `/dev/kvm`.

lacuna_conformance::suite!(lacuna_conformance::Kvm);
