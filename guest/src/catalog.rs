//! The architectures, and the images and parameters of each.

use crate::image::{Image, Param};
use crate::{arm64, x86};

/// A guest's processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// x86-64. Images are ELF64 files, built with the crate.
    X86_64,
    /// AArch64. Images are in the form of Linux's `Image`, and committed beside their sources.
    Arm64,
}

impl Arch {
    /// All images, most useful first; none where [`Arch::unavailable`] has a reason.
    pub fn images(self) -> &'static [Image] {
        match (self, self.unavailable()) {
            (_, Some(_)) => &[],
            (Arch::X86_64, None) => x86::IMAGES,
            (Arch::Arm64, None) => arm64::IMAGES,
        }
    }

    /// The image of that name.
    pub fn image(self, name: &str) -> Option<&'static Image> {
        self.images().iter().find(|image| image.name == name)
    }

    /// Parameters that the kernel reads, for every workload.
    pub fn kernel_params(self) -> &'static [Param] {
        match self {
            Arch::X86_64 => x86::KERNEL_PARAMS,
            Arch::Arm64 => arm64::KERNEL_PARAMS,
        }
    }

    /// The reason why there are no images of this architecture; `None` if there are images.
    pub fn unavailable(self) -> Option<&'static str> {
        match self {
            Arch::X86_64 => {
                let reason = include_str!(concat!(env!("OUT_DIR"), "/unavailable"));
                (!reason.is_empty()).then_some(reason)
            }
            Arch::Arm64 => None,
        }
    }
}

/// All x86-64 images, most useful first; none where [`unavailable`] has a reason.
pub fn images() -> &'static [Image] {
    Arch::X86_64.images()
}

/// The x86-64 image of that name.
pub fn image(name: &str) -> Option<&'static Image> {
    Arch::X86_64.image(name)
}

/// The reason why no x86-64 images are built in: the crate's compiler makes no x86-64 programs.
/// `None` if there are images. Guests from a file run all the same.
pub fn unavailable() -> Option<&'static str> {
    Arch::X86_64.unavailable()
}

/// Whether the catalog has an x86-64 image of that name, built in or not.
pub fn is_known(name: &str) -> bool {
    x86::IMAGES.iter().any(|i| i.name == name)
}
