//! Every behaviour on the soft backend.

lacuna_conformance::suites!(lacuna_conformance::Soft::default());
