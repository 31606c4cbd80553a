//! The guest image: a built-in one, or a file.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Read};

use lacuna::ErrorKind;
use lacuna_guest::Arch;

use crate::args::RunArgs;
use crate::size::Size;

/// The largest file accepted as an image: the whole file is read. A kernel with all its debugging
/// information is smaller.
const FILE_MAX: Size = Size(1 << 30);

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No such guest, and no file that could be opened.
    #[error(
        "{name}: neither a built-in guest nor a file to read: {source}; {}",
        built_in(*arch)
    )]
    Unknown {
        /// The requested name.
        name: String,
        /// The requested processor.
        arch: Arch,
        /// The system's words.
        source: io::Error,
    },
    /// The name of a built-in guest, in a build without guests.
    #[error(
        "{name}: no guest images are built in: {reason}; or give the path of a guest kernel, as in \
         `lacuna run path/to/guest.file`"
    )]
    NotBuiltIn {
        /// The requested name.
        name: String,
        /// Why the build made none.
        reason: &'static str,
    },
    /// A pipe or a device, which may have no end.
    #[error("{0}: an image must be a regular file; copy it into one")]
    NotAFile(String),
    /// Larger than any kernel.
    #[error(
        "{0}: larger than {FILE_MAX}, and no guest kernel is so large; if it is one, strip its \
         debugging information (strip --strip-debug)"
    )]
    TooLarge(String),
    /// The file cannot be read to its end.
    #[error("cannot read {name}: {source}")]
    Read {
        /// The file.
        name: String,
        /// The system's words.
        source: io::Error,
    },
}

impl LoadError {
    /// Where the cause lies.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Unknown { .. } | Self::NotAFile(_) | Self::TooLarge(_) => ErrorKind::Request,
            Self::Read { .. } | Self::NotBuiltIn { .. } => ErrorKind::Host,
        }
    }
}

/// More memory than the kernel of the built-in guests has tables for.
#[derive(Debug, thiserror::Error)]
#[error(
    "--memory {memory}: the built-in guests take at most {limit}; give --memory {limit} or less, \
     or a kernel of your own"
)]
pub struct TooMuchMemory {
    memory: Size,
    limit: Size,
}

/// Refuses more memory than a built-in guest can use: the guest would panic once it runs.
///
/// # Errors
/// When the guest has no tables for so much memory.
pub fn check_limits(args: &RunArgs) -> Result<(), TooMuchMemory> {
    let (memory, limit) = (args.memory, Size(lacuna_guest::MAX_MEMORY));
    if guests(args).image(&args.image).is_some() && memory > limit {
        return Err(TooMuchMemory { memory, limit });
    }
    Ok(())
}

/// A warning about parameters of `--append` that the built-in guest does not read.
pub fn unread_parameters(args: &RunArgs) -> Option<String> {
    let arch = guests(args);
    let image = arch.image(&args.image)?;
    let params = image.params.iter().chain(arch.kernel_params());
    let known: Vec<_> = params.map(|param| param.name).collect();
    let words = args.append.split_whitespace();
    let given = words.filter_map(|word| Some(word.split_once('=')?.0));
    let unread: Vec<_> = given.filter(|name| !known.contains(name)).collect();
    (!unread.is_empty()).then(|| {
        let (unread, known) = (unread.join(", "), known.join(", "));
        format!(
            "--append: {} does not read {unread}: its parameters are {known}",
            args.image
        )
    })
}

/// The built-in guests of the processor that `args` name.
fn guests(args: &RunArgs) -> Arch {
    lacuna_lab::options::guests(args.arch.unwrap_or_default())
}

/// The built-in guests, in words.
fn built_in(arch: Arch) -> String {
    let workloads = arch.images().iter().filter(|image| !image.is_test);
    let names: Vec<_> = workloads.map(|image| image.name).collect();
    match arch.unavailable() {
        None => format!(
            "the workloads are {}, and docs/guide/run.md has the guests for tests too",
            names.join(", ")
        ),
        Some(_) => "no guest is built in".into(),
    }
}

/// The bytes of a built-in image, or of a file.
///
/// # Errors
/// When there is neither.
pub fn load(args: &RunArgs) -> Result<Cow<'static, [u8]>, LoadError> {
    let (name, arch) = (&args.image, guests(args));
    match arch.image(name) {
        Some(image) => Ok(Cow::Borrowed(image.file)),
        None => read(name, arch)
            .map(Cow::Owned)
            .map_err(|error| not_built_in(name, arch, error)),
    }
}

/// If the name belongs to a guest that this build lacks, the error says so instead of "no such
/// file".
fn not_built_in(name: &str, arch: Arch, error: LoadError) -> LoadError {
    match (error, arch.unavailable()) {
        (LoadError::Unknown { .. }, Some(reason)) if lacuna_guest::is_known(name) => {
            LoadError::NotBuiltIn {
                name: name.to_owned(),
                reason,
            }
        }
        (error, _) => error,
    }
}

fn read(name: &str, arch: Arch) -> Result<Vec<u8>, LoadError> {
    let unknown = |source| LoadError::Unknown {
        name: name.to_owned(),
        arch,
        source,
    };
    let failed = |source| LoadError::Read {
        name: name.to_owned(),
        source,
    };
    // Checked before it is opened, because opening a pipe waits for its writer.
    let is_file = fs::metadata(name).map_err(unknown)?.is_file();
    if !is_file {
        return Err(LoadError::NotAFile(name.to_owned()));
    }
    let file = File::open(name).map_err(unknown)?;
    let size = file.metadata().map_err(failed)?.len();
    let mut bytes = Vec::new();
    if size <= FILE_MAX.0 {
        let reserved = bytes.try_reserve_exact(size as usize);
        reserved.map_err(|error| failed(error.into()))?;
        let mut limited = file.take(FILE_MAX.0 + 1);
        limited.read_to_end(&mut bytes).map_err(failed)?;
    }
    // Some files are longer than they say, for example in /proc.
    if size.max(bytes.len() as u64) > FILE_MAX.0 {
        return Err(LoadError::TooLarge(name.to_owned()));
    }
    Ok(bytes)
}
