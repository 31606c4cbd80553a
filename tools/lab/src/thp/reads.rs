//! Random reads over more memory than 4 KiB TLB entries cover. The null is a second VM with 4 KiB
//! pages.

use crate::experiment::{LabError, Options};
use crate::fixture::resident;
use crate::players::{Cast, InBackground, Slice, with_players};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Summary, paired, rounds};
use lacuna_soft::{Delivery, HugePages, VmBuilder};
use std::time::Duration;

/// `thp.random_read_ratio`.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), LabError> {
    let mib = if options.quick { 256 } else { 1024 };
    let builder = |huge| {
        VmBuilder {
            huge,
            command_line: format!("huge=1 bytes={mib}M seconds=1000000"),
            // Room for the kernel and its tables, beside the memory to be read.
            ..resident(mib + 64, 1)
        }
    };
    let cast = Cast {
        guest: "reads",
        delivery: Delivery::Bitmap,
        background: InBackground::Reclaim,
    };
    let turn = Slice {
        settle: Duration::from_millis(40),
        counted: Duration::from_millis(100),
    };
    let builders = [HugePages::Never, HugePages::Always, HugePages::Never].map(builder);
    let rates = with_players(&builders, cast, |mut players| {
        let repeats = if options.quick { 2 } else { 15 };
        rounds(3, repeats, |arm| Ok(players[arm].slice(turn)?.rate))
    })?;
    let ratio = paired(&rates[0], &rates[1]);
    report.push(
        Measurement::new("thp.random_read_ratio", "x", Better::Higher, ratio)
            .param("mib", mib)
            .param("guest_pages", "2 MiB in both")
            .arm("small_reads_per_s", Summary::of(&rates[0]))
            .arm("huge_reads_per_s", Summary::of(&rates[1]))
            .arm("null", paired(&rates[0], &rates[2])),
    );
    Ok(())
}
