//! The cost of PML without logging slots: every vCPU checks for pages to log, and there are none.

use super::score_charge::COLD_MAX;
use super::score_guest::{Churn, Period, Setup, Watch, play};
use crate::experiment::LabError;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, percent_across};
use lacuna_soft::Detection;

const ID: &str = "pml.always_on_loss_percent";

const ARMS: [Watch; 3] = [
    Watch::Nothing(Detection::WriteProtect),
    Watch::Nothing(Detection::WriteProtect),
    Watch::Nothing(Detection::Pml),
];
const OFF: usize = 0;
const NULL: usize = 1;
const ON: usize = 2;

/// `pml.always_on_loss_percent`.
///
/// # Errors
/// An error of the guest; and any logged page, because no slot logs.
pub fn measure(
    report: &mut Report,
    churns: &mut [Churn<'_>],
    setup: &Setup,
    rounds: usize,
) -> Result<(), LabError> {
    let periods = play(churns, setup, &ARMS, COLD_MAX, rounds)?;
    let logged: u64 = periods[ON]
        .iter()
        .map(|period| period.counted.stats)
        .map(|stats| stats.logged + stats.log_full + stats.flushes)
        .sum();
    if logged > 0 {
        return Err(LabError::Guest(format!(
            "there were {logged} log entries, full logs and flushes, but no slot logs"
        )));
    }
    let [off, null, on] =
        [OFF, NULL, ON].map(|arm| -> Vec<f64> { periods[arm].iter().map(Period::rate).collect() });
    let loss = lost(percent_across(&off, &on, rounds));
    let null = lost(percent_across(&off, &null, rounds));
    report.push(
        Measurement::new(ID, "%", Better::Lower, loss)
            .reference(
                0.45,
                "cover letter of the KVM PML series, 2015: 0.06 and 0.45",
            )
            .param("entries_logged", logged)
            .param("inside_null", inside(loss, null))
            .arm("null_percent", null)
            .arm("off_per_s", Summary::of(&off))
            .arm("on_per_s", Summary::of(&on)),
    );
    report.say(format!(
        "PML on while no slot logs: {logged} pages are logged, and the guest loses {:.2} %. That \
         is {} the interval of the null ({:.2} .. {:.2}).",
        loss.median,
        if inside(loss, null) {
            "inside"
        } else {
            "outside"
        },
        null.low,
        null.high
    ));
    Ok(())
}

fn inside(loss: Summary, null: Summary) -> bool {
    (null.low..=null.high).contains(&loss.median)
}

/// The loss of a score, in percent.
fn lost(left: Summary) -> Summary {
    Summary {
        median: 100.0 - left.median,
        low: 100.0 - left.high,
        high: 100.0 - left.low,
        ..left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_what_the_ratio_lacks() {
        let loss = lost(Summary::of(&[98.0, 99.0, 101.0]));
        assert!((loss.median - 1.0).abs() < 1e-9);
        assert!((loss.low + 1.0).abs() < 1e-9 && (loss.high - 2.0).abs() < 1e-9);
        assert!(inside(loss, lost(Summary::of(&[97.0, 100.0, 103.0]))));
        assert!(!inside(loss, lost(Summary::of(&[100.0]))));
    }
}
