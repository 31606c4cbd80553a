//! What `lacuna pager` serves: from its options, or from the file of `--config`.

use crate::args::{PagedImage, PagerArgs};
use crate::exit::Exit;
use crate::size::parse_duration;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use toml::Spanned;

/// The settings of a pager. Both forms make the same.
#[derive(PartialEq, Debug)]
pub struct Settings {
    /// At least one.
    pub images: Vec<PagedImage>,
    /// Where the counters are.
    pub metrics: Option<SocketAddr>,
    /// How long a VM is idle before its pages go to swap.
    pub cold_after: Option<Duration>,
}

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    image: Vec<Spanned<PagedImage>>,
    metrics: Option<SocketAddr>,
    cold_after: Option<Spanned<String>>,
}

impl Settings {
    /// The settings in `args`, or in their file.
    ///
    /// # Errors
    /// The file cannot be read, or is wrong.
    pub fn of(args: &PagerArgs) -> Result<Self, (Exit, String)> {
        let Some(path) = &args.config else {
            return Ok(Self {
                images: args.image.iter().cloned().collect(),
                metrics: args.metrics,
                cold_after: args.cold_after,
            });
        };
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| {
            let text = format!(
                "--config: {}: {error}: name a readable file",
                path.display()
            );
            (Exit::Usage, text)
        })?;
        Self::parse(&text, path).map_err(|wrong| (Exit::Usage, wrong))
    }

    /// The settings in `text`, the content of the file at `path`.
    ///
    /// # Errors
    /// The text is wrong: the file, the line, and what to do.
    pub fn parse(text: &str, path: &Path) -> Result<Self, String> {
        let wrong = |at: usize, what: &str| {
            let before = text.as_bytes().iter().take(at);
            let line = 1 + before.filter(|byte| **byte == b'\n').count();
            format!("{}:{line}: {what}", path.display())
        };
        let file: File = toml::from_str(text).map_err(|error| {
            let what = error.message().replace('\n', " ");
            let at = error.span().map_or(0, |span| span.start);
            wrong(at, &format!("{what}; docs/pager.md has an example"))
        })?;
        let cold_after = file.cold_after.map(|time| {
            let parsed = parse_duration(time.get_ref());
            parsed.map_err(|error| wrong(time.span().start, &format!("cold-after: {error}")))
        });
        let cold_after = cold_after.transpose()?;
        if file.image.is_empty() {
            return Err(wrong(
                0,
                "there is no [[image]]: add one, with socket and from",
            ));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut images = Vec::<PagedImage>::new();
        for image in file.image {
            let at = image.span().start;
            let mut image = image.into_inner();
            image.below(folder);
            if images.iter().any(|other| other.socket == image.socket) {
                let socket = image.socket.display();
                let what = format!("another image has the socket {socket}: give each its own");
                return Err(wrong(at, &what));
            }
            let has_same = |other: &PagedImage| other.record == image.record;
            if let Some(record) = &image.record
                && images.iter().any(has_same)
            {
                let record = record.display();
                let what = format!("another image has the record {record}: give each its own");
                return Err(wrong(at, &what));
            }
            images.push(image);
        }
        Ok(Self {
            images,
            metrics: file.metrics,
            cold_after,
        })
    }
}

#[cfg(test)]
mod tests;
