//! Every behaviour on the soft backend.

lacuna_conformance::suite!(lacuna_conformance::Soft::default());
lacuna_conformance::suite!(interface lacuna_conformance::Soft::default());
