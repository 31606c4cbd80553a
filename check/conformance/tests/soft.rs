//! Every behaviour on the soft backend.

lacuna_conformance::suite!(lacuna_conformance::Soft::default());
