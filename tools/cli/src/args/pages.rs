//! `--pages-from`: where the guest's memory comes from.

use crate::size::parse_duration;
use lacuna::source::{Policy, WhenGone};
use lacuna_control::store::url;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// The forms of a page source.
const FORMS: &str = "zeros, file:PATH, file:BASE+DIFF, snapshot:PATH, objects:URL, peer:PATH or \
                     handler:PATH";

/// A page source, as `--pages-from` describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PagesFrom {
    /// Pages of zeros.
    Zeros,
    /// A raw memory file.
    File(PathBuf),
    /// A raw memory file, and the diffs made after it, the oldest first.
    Layers {
        /// The memory file.
        base: PathBuf,
        /// At least one.
        diffs: Vec<PathBuf>,
    },
    /// The memory of a snapshot, in a folder or at a URL.
    Snapshot(PathBuf),
    /// A raw memory file in an object store, by its URL.
    Object(String),
    /// A process that serves pages at this socket.
    Peer(PathBuf),
    /// A process that fills the memory itself, with Firecracker's handshake at this socket.
    Handler(PathBuf),
}

impl PagesFrom {
    /// Memory files: the base, then its diffs.
    pub fn files(files: impl IntoIterator<Item = PathBuf>) -> Option<Self> {
        let mut files = files.into_iter();
        let (base, diffs) = (files.next()?, files.collect::<Vec<_>>());
        let all = [&base].into_iter().chain(&diffs);
        let has_names = all.into_iter().all(|path| !path.as_os_str().is_empty());
        has_names.then_some(match diffs.is_empty() {
            true => Self::File(base),
            false => Self::Layers { base, diffs },
        })
    }

    /// Relative paths are below `folder`.
    pub fn below(&mut self, folder: &Path) {
        let place = |path: &mut PathBuf| *path = folder.join(&path);
        match self {
            Self::Zeros | Self::Object(_) => {}
            Self::Snapshot(path) if url(path).is_some() => {}
            Self::File(path) | Self::Snapshot(path) | Self::Peer(path) | Self::Handler(path) => {
                place(path);
            }
            Self::Layers { base, diffs } => [base].into_iter().chain(diffs).for_each(place),
        }
    }
}

impl FromStr for PagesFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = match text.split_once(':') {
            None if text == "zeros" => Some(Self::Zeros),
            Some(("file", paths)) => Self::files(paths.split('+').map(PathBuf::from)),
            None | Some((_, "")) => None,
            Some(("snapshot", place)) => Some(Self::Snapshot(place.into())),
            Some(("objects", url)) => Some(Self::Object(url.into())),
            Some(("peer", path)) => Some(Self::Peer(path.into())),
            Some(("handler", path)) => Some(Self::Handler(path.into())),
            Some(_) => None,
        };
        found.ok_or_else(|| format!("{text:?} is no page source; use {FORMS}"))
    }
}

/// As `--pages-from` takes it.
impl fmt::Display for PagesFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeros => f.write_str("zeros"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Layers { base, diffs } => {
                write!(f, "file:{}", base.display())?;
                diffs
                    .iter()
                    .try_for_each(|diff| write!(f, "+{}", diff.display()))
            }
            Self::Snapshot(place) => write!(f, "snapshot:{}", place.display()),
            Self::Object(url) => write!(f, "objects:{url}"),
            Self::Peer(path) => write!(f, "peer:{}", path.display()),
            Self::Handler(path) => write!(f, "handler:{}", path.display()),
        }
    }
}

/// `--patience`: how long a source may take for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    /// After this time the page is lost.
    Until(Duration),
    /// The guest waits as long as it takes.
    Forever,
}

impl Patience {
    /// The help text of `--patience`, the same for each command with this option.
    /// docs/guide/snapshots.md has the rule for every source (A source that provides no pages), and
    /// [`Policy`] is its form in code.
    pub const HELP: &str = "How long the source of the guest's pages may take for one, until the \
                            page is lost and the run ends; or forever [default: 10s]";

    /// The policy of a page source by this option.
    pub fn policy(patience: Option<Self>) -> Policy {
        let mut policy = Policy::default();
        match patience {
            Some(Self::Until(time)) => policy.patience = time,
            Some(Self::Forever) => policy.when_gone = WhenGone::Hold,
            None => {}
        }
        policy
    }

    /// How long a thread waits for an object store by this option.
    pub fn of_threads(patience: Option<Self>) -> Duration {
        match patience {
            Some(Self::Forever) => Duration::MAX,
            _ => Self::policy(patience).patience,
        }
    }
}

impl FromStr for Patience {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "forever" => Ok(Self::Forever),
            _ => parse_duration(text)
                .map(Self::Until)
                .map_err(|error| format!("{error}; or give forever")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sources() {
        for (text, source) in [
            ("zeros", PagesFrom::Zeros),
            ("file:/var/a:b", PagesFrom::File("/var/a:b".into())),
            ("peer:run/socket", PagesFrom::Peer("run/socket".into())),
            ("handler:/h", PagesFrom::Handler("/h".into())),
            ("snapshot:s", PagesFrom::Snapshot("s".into())),
            ("objects:s3://b/m", PagesFrom::Object("s3://b/m".into())),
            (
                "file:a+b+c",
                PagesFrom::Layers {
                    base: "a".into(),
                    diffs: vec!["b".into(), "c".into()],
                },
            ),
        ] {
            assert_eq!(text.parse(), Ok(source.clone()));
            assert_eq!(source.to_string(), text);
        }
        for text in [
            "",
            "file",
            "file:",
            "file:a+",
            "file:+b",
            "peer:",
            "handler:",
            "snapshot:",
            "objects:",
            "tape:/x",
            "zeros:1",
        ] {
            let error = text.parse::<PagesFrom>().unwrap_err();
            assert!(error.ends_with("peer:PATH or handler:PATH"), "{error}");
        }
    }

    #[test]
    fn patience() {
        assert_eq!("forever".parse(), Ok(Patience::Forever));
        let seconds = Patience::Until(Duration::from_secs(3));
        assert_eq!("3s".parse(), Ok(seconds));
        let error = "3".parse::<Patience>().unwrap_err();
        assert!(error.ends_with("; or give forever"), "{error}");
    }
}
