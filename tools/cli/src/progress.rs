//! Progress on stderr, if stderr is a terminal and progress is wanted.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A line of text.
pub(crate) fn line(quiet: bool) -> ProgressBar {
    drawn(quiet, None, "{msg}")
}

/// A bar of pages.
pub(crate) fn bar(quiet: bool) -> ProgressBar {
    drawn(quiet, Some(0), "{msg} {bar:24} {percent:>3} %  {pos} pages")
}

fn drawn(quiet: bool, length: Option<u64>, template: &str) -> ProgressBar {
    let target = match quiet {
        true => ProgressDrawTarget::hidden(),
        false => ProgressDrawTarget::stderr_with_hz(5),
    };
    let style = ProgressStyle::with_template(template).expect("the template is well formed");
    ProgressBar::with_draw_target(length, target).with_style(style.progress_chars("█░"))
}
