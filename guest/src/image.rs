//! An image, and its parameters.

/// A word `name=value` that a kernel or workload reads from its command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: &'static str,
    /// The value if it is not given.
    pub default: &'static str,
    /// Its effect, with its unit.
    pub about: &'static str,
}

/// A bootable guest: the kernel with one workload inside.
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// The workload's name.
    pub name: &'static str,
    /// The image, in the form of its [`Arch`](crate::Arch).
    pub file: &'static [u8],
    /// Its purpose, in one line.
    pub about: &'static str,
    /// Its parameters.
    pub params: &'static [Param],
    /// Whether it tests the machine that runs it. The other images are loads for users.
    pub is_test: bool,
}

impl Image {
    pub(crate) const fn test(mut self) -> Self {
        self.is_test = true;
        self
    }
}

pub(crate) const fn param(name: &'static str, default: &'static str, about: &'static str) -> Param {
    Param {
        name,
        default,
        about,
    }
}
