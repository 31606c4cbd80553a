//! The contract of asynchronous page faults (`lacuna_apf::arm64`) from and to its neutral form.

use lacuna_apf::arm64 as contract;
use lacuna_apf::arm64::{Features, NotRestorable, Numbers, Saved};
use lacuna_machine::StateError;
use lacuna_machine::arm64::{AsyncFaults, Context, Form, Handler, Offered, Sdei};

pub(super) fn not_restorable(why: NotRestorable) -> StateError {
    StateError::Unsupported {
        field: why.field,
        value: why.value,
    }
}

pub(super) fn offered((features, numbers): (Features, Option<Numbers>)) -> Offered {
    let numbers = numbers.filter(|_| features.contains(Features::SDEI));
    Offered {
        features: features.bits(),
        event: numbers.map_or(0, |numbers| numbers.event),
        interrupt: numbers.map_or(0, |numbers| numbers.interrupt),
    }
}

/// Whether the offer `here` includes the offer `saved` of a guest.
///
/// # Errors
/// The missing or different field.
pub(super) fn check_offer(saved: &Offered, here: &Offered) -> Result<(), StateError> {
    let missing = saved.features & !here.features;
    let fields = [
        ("apf.offered.features", missing, 0),
        ("apf.offered.event", saved.event, here.event),
        ("apf.offered.interrupt", saved.interrupt, here.interrupt),
    ];
    for (field, value, expected) in fields {
        if value != 0 && value != expected {
            let value = value.into();
            return Err(StateError::Unsupported { field, value });
        }
    }
    Ok(())
}

/// The neutral form.
pub(super) fn async_faults(saved: &Saved, offer: (Features, Option<Numbers>)) -> AsyncFaults {
    let form = |form| match form {
        contract::Form::Abort => Form::Abort,
        contract::Form::Sdei => Form::Sdei,
    };
    let contract::Sdei {
        handler,
        masked,
        interrupted,
    } = saved.sdei;
    AsyncFaults {
        offered: offered(offer),
        enabled: saved.enabled.map(|(of, value)| (form(of), value)),
        range: saved.range,
        sdei: Sdei {
            handler: handler.map(|handler| Handler {
                entry: handler.entry,
                argument: handler.argument,
                enabled: handler.enabled,
            }),
            masked,
            interrupted: interrupted.map(|context| Context {
                x: context.x,
                pc: context.pc,
                pstate: context.pstate,
            }),
        },
        untaken: saved.untaken,
        unacknowledged: saved.unacknowledged,
    }
}

/// The contract's form of a neutral state.
pub(super) fn configuration(faults: &AsyncFaults) -> Saved {
    let form = |form| match form {
        Form::Abort => contract::Form::Abort,
        Form::Sdei => contract::Form::Sdei,
    };
    let Sdei {
        handler,
        masked,
        interrupted,
    } = faults.sdei;
    Saved {
        enabled: faults.enabled.map(|(of, value)| (form(of), value)),
        range: faults.range,
        sdei: contract::Sdei {
            handler: handler.map(|handler| contract::Handler {
                entry: handler.entry,
                argument: handler.argument,
                enabled: handler.enabled,
            }),
            masked,
            interrupted: interrupted.map(|context| contract::Context {
                x: context.x,
                pc: context.pc,
                pstate: context.pstate,
            }),
        },
        untaken: faults.untaken,
        unacknowledged: faults.unacknowledged,
    }
}
