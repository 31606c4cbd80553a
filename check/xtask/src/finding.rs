//! A broken rule, and where.

use std::fmt;

/// One breach, printed as `path:line: what`, which editors and CI logs can follow.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Finding {
    /// Path from the root of the workspace.
    pub path: String,
    /// Line, counted from one; 0 for the whole file.
    pub line: usize,
    /// The fault, and the remedy if it is not obvious.
    pub what: String,
}

impl Finding {
    /// A breach at a line.
    pub fn at(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            what: what.into(),
        }
    }

    /// A breach of a whole file.
    pub fn of(path: &str, what: impl Into<String>) -> Self {
        Self::at(path, 0, what)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.what),
            line => write!(f, "{}:{line}: {}", self.path, self.what),
        }
    }
}
