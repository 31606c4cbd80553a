//! A guest kernel image: an ELF64 file for x86-64, or Linux's `Image` for AArch64.

mod arm64;

use crate::Arch;
use elf::{ElfBytes, abi, endian::AnyEndian, file::Class, note::Note};
use lacuna_addr::Gpa;

/// `XEN_ELFNOTE_PHYS32_ENTRY` (xen/include/public/elfnote.h).
const PVH_NOTE: u64 = 18;

/// Why a file is not a guest image.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum ImageError {
    /// Bad magic, or the headers are cut off.
    #[error(
        "not an ELF file ({0}); a guest is an ELF64 kernel with the PVH note, or an arm64 `Image`"
    )]
    NotElf(String),
    /// The file is for a 32-bit processor, or for an architecture that Lacuna lacks.
    #[error(
        "ELF file for {0}; give a 64-bit x86-64 kernel, or an AArch64 kernel in the form of \
         Linux's `Image` (objcopy -O binary)"
    )]
    WrongMachine(String),
    /// The file is a program, not a kernel.
    #[error(
        "ELF file without the PVH note (XEN_ELFNOTE_PHYS32_ENTRY): a program, not a guest kernel"
    )]
    NoPvhNote,
    /// A segment's file range lies outside the file.
    #[error("segment {index}: bytes {offset:#x}+{size:#x} lie outside the file of {file:#x} bytes")]
    Truncated {
        /// Program header index.
        index: usize,
        /// File offset.
        offset: u64,
        /// Bytes in the file.
        size: u64,
        /// The file's size.
        file: u64,
    },
    /// A segment's physical addresses are out of range.
    #[error("segment {index}: physical address {addr:#x}+{size:#x} is past 48 bits")]
    BadAddress {
        /// Program header index.
        index: usize,
        /// Physical address.
        addr: u64,
        /// Bytes in memory.
        size: u64,
    },
    /// The file has nothing to load.
    #[error("ELF file has no loadable segment")]
    Empty,
    /// An arm64 `Image` of a big-endian kernel.
    #[error("arm64 `Image` of a big-endian kernel; the processors are little-endian")]
    BigEndian,
    /// An arm64 `Image` of a kernel with larger pages.
    #[error("arm64 `Image` of a kernel with {0} KiB pages; build it with 4 KiB pages")]
    Granule(u32),
    /// The text offset of an arm64 `Image` is not less than 2 MiB.
    #[error("arm64 `Image` with the text offset {0:#x}, which must be less than 2 MiB")]
    TextOffset(u64),
    /// The entry point lies in no segment.
    #[error("entry point {0:#x} lies in no loadable segment")]
    BadEntry(u64),
}

/// A loadable segment: `bytes`, then zeros up to `size`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment<'a> {
    /// Its guest-physical address.
    pub gpa: Gpa,
    /// Its content in the file.
    pub bytes: &'a [u8],
    /// Size in memory, at least `bytes.len()`.
    pub size: u64,
}

impl Segment<'_> {
    /// The number of bytes that the segment occupies in memory. If a VMM has made the segment,
    /// `size` may be smaller than the content.
    pub(crate) fn extent(&self) -> u64 {
        self.size.max(self.bytes.len() as u64)
    }
}

/// A parsed guest kernel; nothing has been loaded.
///
/// [`Image::parse`] takes two forms.
///
/// * x86-64: an ELF64 file whose segments are at their physical addresses, at or above 64 KiB. It
///   must have the PVH note (`XEN_ELFNOTE_PHYS32_ENTRY`, Xen's PVH boot ABI): the note
///   distinguishes a kernel from any other program, and other VMMs start the image by it. Lacuna
///   itself enters at the ELF entry point, in 64-bit mode; [`Boot`](crate::Boot) describes the
///   state.
/// * AArch64: the `Image` of Linux's arm64 boot protocol, not compressed. It is loaded at 2 MiB
///   above the beginning of memory, plus its text offset. [`arm64::Boot`](crate::boot::arm64::Boot)
///   describes the start of the vCPUs.
///
/// A VMM whose guest is not a file fills in the fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image<'a> {
    /// The architecture of its processors.
    pub arch: Arch,
    /// Loadable segments in file order.
    pub segments: Vec<Segment<'a>>,
    /// Physical entry point.
    pub entry: Gpa,
}

impl<'a> Image<'a> {
    /// Parses and checks `file`.
    pub fn parse(file: &'a [u8]) -> Result<Self, ImageError> {
        if arm64::is_image(file) {
            return arm64::parse(file);
        }
        let not_elf = |e: elf::ParseError| ImageError::NotElf(e.to_string());
        let elf = ElfBytes::<AnyEndian>::minimal_parse(file).map_err(not_elf)?;
        let arch = arch(elf.ehdr.class, elf.ehdr.e_machine)?;
        let headers = elf.segments().ok_or(ImageError::Empty)?;
        let mut segments = Vec::new();
        let mut pvh = false;
        for (index, header) in headers.iter().enumerate() {
            match header.p_type {
                abi::PT_LOAD if header.p_memsz > 0 => segments.push(segment(file, index, &header)?),
                abi::PT_NOTE => {
                    let notes = elf.segment_data_as_notes(&header).map_err(not_elf)?;
                    pvh |= notes.into_iter().any(|note| is_pvh(&note));
                }
                _ => {}
            }
        }
        match arch {
            Arch::X86_64 if !pvh => return Err(ImageError::NoPvhNote),
            Arch::X86_64 | Arch::Arm64 => {}
        }
        if segments.is_empty() {
            return Err(ImageError::Empty);
        }
        let entry = elf.ehdr.e_entry;
        let inside = |s: &Segment| s.gpa.get() <= entry && entry < s.gpa.get() + s.size;
        let entry = match Gpa::new(entry) {
            Some(gpa) if segments.iter().any(inside) => gpa,
            _ => return Err(ImageError::BadEntry(entry)),
        };
        Ok(Self {
            arch,
            segments,
            entry,
        })
    }

    /// One past the highest byte of any segment.
    pub fn end(&self) -> u64 {
        self.segments
            .iter()
            .map(|s| s.gpa.get().saturating_add(s.extent()))
            .max()
            .unwrap_or(0)
    }
}

fn is_pvh(note: &Note<'_>) -> bool {
    matches!(note, Note::Unknown(any) if any.n_type == PVH_NOTE && any.name.starts_with(b"Xen"))
}

/// The architecture of a file for `machine`. The error names an unsupported machine.
fn arch(class: Class, machine: u16) -> Result<Arch, ImageError> {
    let bits = if class == Class::ELF64 { 64 } else { 32 };
    let name = match (class, machine) {
        (Class::ELF64, abi::EM_X86_64) => return Ok(Arch::X86_64),
        (Class::ELF32, abi::EM_X86_64) => "x86-64 with 32-bit pointers (x32)".into(),
        (_, abi::EM_386) => "32-bit x86".into(),
        (_, abi::EM_AARCH64) => "AArch64".into(),
        (_, abi::EM_ARM) => "32-bit Arm".into(),
        (_, abi::EM_RISCV) => format!("RISC-V ({bits}-bit)"),
        (_, abi::EM_PPC64) => "64-bit PowerPC".into(),
        (_, abi::EM_S390) => "s390".into(),
        (_, abi::EM_LOONGARCH) => "LoongArch".into(),
        (_, other) => format!("ELF machine {other} ({bits}-bit)"),
    };
    Err(ImageError::WrongMachine(name))
}

fn segment<'a>(
    file: &'a [u8],
    index: usize,
    header: &elf::segment::ProgramHeader,
) -> Result<Segment<'a>, ImageError> {
    let (offset, size) = (header.p_offset, header.p_filesz);
    let truncated = || ImageError::Truncated {
        index,
        offset,
        size,
        file: file.len() as u64,
    };
    let end = offset.checked_add(size).ok_or_else(truncated)?;
    if header.p_filesz > header.p_memsz {
        return Err(truncated());
    }
    let bytes = usize::try_from(offset)
        .ok()
        .zip(usize::try_from(end).ok())
        .and_then(|(a, b)| file.get(a..b))
        .ok_or_else(truncated)?;
    let bad = ImageError::BadAddress {
        index,
        addr: header.p_paddr,
        size: header.p_memsz,
    };
    let gpa = Gpa::new(header.p_paddr).ok_or(bad.clone())?;
    gpa.checked_add(header.p_memsz).ok_or(bad)?;
    Ok(Segment {
        gpa,
        bytes,
        size: header.p_memsz,
    })
}
