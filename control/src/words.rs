//! Where a migration stands, in words.

use lacuna::migrate::session::{
    IncomingHandle, IncomingProgress, IncomingStage, MissingRange, OutgoingHandle, OutgoingStage,
};

/// How many ranges of missing pages are reported.
pub(crate) const RANGES_SHOWN: usize = 16;

/// At the source: why it is undecided which side runs the guest, or with which memory, and what to
/// do.
pub(crate) fn undecided_at_source(handle: &OutgoingHandle) -> Option<String> {
    let now = handle.progress();
    let (to, cut) = (&now.to, now.cut.as_deref().unwrap_or_default());
    match now.stage {
        OutgoingStage::Here | OutgoingStage::There => None,
        OutgoingStage::Unknown => Some(format!(
            "the guest was handed over, and then {cut}: it is not known whether it runs at \
             {to}. It is paused here. If it runs there, or shall run there, end it here: \
             {{\"command\":\"stop\"}}. If not, end it there first, and then resume it here: \
             {{\"command\":\"keep\"}}, which is lacuna migrate --keep"
        )),
        OutgoingStage::Cut => Some(format!(
            "the guest runs at {to}, and then {cut}: it lacks up to {} pages there, \
             which only this process has. If it has ended there, end it here: \
             {{\"command\":\"stop\"}}; the pages are lost then",
            handle.lacks()
        )),
    }
}

/// As [`undecided_at_source`], after the attempts to connect again were cancelled.
pub(crate) fn given_up_at_source(handle: &OutgoingHandle) -> String {
    let text = undecided_at_source(handle).unwrap_or_default();
    let to = handle.to();
    format!(
        "{text}. This side no longer tries to connect. To make it try again, ask it again to move \
         the guest to {to}"
    )
}

/// At the source: why a guest must not resume here by a decision.
pub(crate) fn no_decision(stage: OutgoingStage, to: &str) -> String {
    match stage {
        OutgoingStage::Here => {
            format!("the guest is being moved to {to}: wait for its end, or cancel it")
        }
        OutgoingStage::There | OutgoingStage::Cut => format!(
            "the guest runs at {to}: what is here is an older state of it, which must not run"
        ),
        OutgoingStage::Unknown => {
            "another request, or the end of the run, was first: ask for the status, and decide \
             again if the guest is paused here"
                .into()
        }
    }
}

/// At the destination: what is undecided about an incoming guest, and what to do.
pub fn undecided_at_destination(guest: &IncomingHandle) -> Option<String> {
    undecided(&guest.progress(RANGES_SHOWN))
}

/// As [`undecided_at_destination`], from the guest's progress with [`RANGES_SHOWN`] ranges.
pub(crate) fn undecided(now: &IncomingProgress) -> Option<String> {
    let cut = now.cut.as_deref().unwrap_or_default();
    match now.stage {
        IncomingStage::Unknown => Some(format!(
            "the guest is prepared here, and then {cut}: it is not known whether its source \
             has handed it over. It is paused here, and the source may connect again at {}. If \
             it runs there, or shall run there, end it here: {{\"command\":\"stop\"}}. If not, \
             end it there first, and then resume it here: {{\"command\":\"keep\"}}, which is \
             lacuna migrate --keep",
            now.at
        )),
        IncomingStage::Cut => Some(format!(
            "the guest runs here, and then {cut}: it lacks {}. A vCPU that needs one of them \
             waits, and the source may connect again at {}. If the source has ended, say so: \
             {{\"command\":\"cancel\"}}, which is lacuna migrate --cancel; the pages are lost \
             then, and the guest runs until it needs one",
            missing_in_words(now.missing.unwrap_or(0), &now.ranges),
            now.at
        )),
        _ => None,
    }
}

/// Missing pages in words: how many, and where the first 16 ranges of them are.
pub fn missing_in_words(missing: u64, ranges: &[MissingRange]) -> String {
    let ranges = &ranges[..ranges.len().min(RANGES_SHOWN)];
    let shown: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    let reported: u64 = ranges.iter().map(|range| range.pages).sum();
    let more = match missing.saturating_sub(reported) {
        0 => String::new(),
        more => format!(" and {more} pages behind them"),
    };
    match ranges.is_empty() {
        true => format!("{missing} pages"),
        false => format!("{missing} pages, at {}{more}", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_pages_in_words() {
        let ranges =
            [(0x1000, 1), (0x10_0000, 256)].map(|(address, pages)| MissingRange { address, pages });
        for (missing, ranges, expected) in [
            (0, &[][..], "0 pages"),
            (
                257,
                &ranges,
                "257 pages, at 0x1000-0x1fff, 0x100000-0x1fffff",
            ),
            (
                300,
                &ranges,
                "300 pages, at 0x1000-0x1fff, 0x100000-0x1fffff and 43 pages behind them",
            ),
        ] {
            assert_eq!(missing_in_words(missing, ranges), expected);
        }
    }
}
