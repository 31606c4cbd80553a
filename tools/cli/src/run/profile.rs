//! `--profile`: where the guest's processors are, a hundred times a second.
//!
//! A sample is a pause: every vCPU leaves the guest by a kick, and its saved state has the program
//! counter. So the profile is the same on every backend. A halted vCPU is sampled at its halt
//! instruction. A vCPU in the middle of an instruction, such as one that waits for a page, has no
//! state to save: these samples have a row of their own.

use crate::args::RunArgs;
use crate::image::load;
use crate::sample::ProfileRow;
use elf::ElfBytes;
use elf::abi::{SHN_UNDEF, STT_FUNC, STT_NOTYPE};
use elf::endian::AnyEndian;
use lacuna::state::{StateError, VcpuState, arm64, x86};
use lacuna::{PlatformDevices, Running, SaveRestore, Vm};
use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

/// The time from the end of a sample to the next one.
const PERIOD: Duration = Duration::from_millis(10);
/// The rows of the table for people.
const SHOWN: usize = 20;

/// The most bytes of code after a label.
const LABEL: u64 = 4096;

/// Where a vCPU was.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Place {
    /// At this program counter, in a program of the guest or in its kernel.
    Code { user: bool, pc: u64 },
    /// In the middle of an instruction.
    MidInstruction,
    /// The guest has not started the vCPU, or has switched it off.
    Off,
    /// The backend refused the state.
    Unknown,
}

/// The samples of a run.
#[derive(Default)]
pub struct Samples(BTreeMap<Place, u64>);

impl Samples {
    /// Takes samples until the guest ends.
    pub fn take<V: Vm>(running: &Running<V>, devices: &PlatformDevices) -> Self {
        let mut samples = Self::default();
        while devices.ending().is_none() {
            let Some(mut paused) = running.pause() else {
                break;
            };
            for vcpu in paused.vcpus() {
                *samples.0.entry(place(vcpu)).or_default() += 1;
            }
            drop(paused);
            thread::sleep(PERIOD);
        }
        samples
    }

    /// The functions of the image of `args`, the most frequent first.
    pub fn rows(&self, args: &RunArgs) -> Vec<ProfileRow> {
        // A guest without an image, such as a restored one, and an image that is gone have no
        // symbols.
        let file = load(args).unwrap_or_default();
        let symbols = Symbols::of(&file);
        let mut by_name = BTreeMap::<_, u64>::new();
        for (place, samples) in &self.0 {
            let name = match *place {
                Place::Code { user, pc } => {
                    let privilege = if user { "user" } else { "kernel" };
                    (Some(privilege), symbols.name(pc))
                }
                Place::MidInstruction => (None, "in the middle of an instruction".into()),
                Place::Off => (None, "switched off".into()),
                Place::Unknown => (None, "the state could not be saved".into()),
            };
            *by_name.entry(name).or_default() += samples;
        }
        let all: u64 = self.0.values().sum();
        let row = |((privilege, symbol), samples)| ProfileRow {
            percent: 100.0 * samples as f64 / all as f64,
            samples,
            privilege,
            symbol,
        };
        let mut rows: Vec<_> = by_name.into_iter().map(row).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.samples));
        rows
    }
}

fn place(vcpu: &mut impl SaveRestore) -> Place {
    match vcpu.save() {
        Ok(VcpuState::X86(state)) if state.run == x86::RunState::WaitingForStartup => Place::Off,
        Ok(VcpuState::X86(state)) => Place::Code {
            user: state.system.segments[x86::segment::CS].selector & 3 == 3,
            pc: state.regs.rip,
        },
        Ok(VcpuState::Arm64(state)) => match state.run {
            arm64::RunState::Off | arm64::RunState::OnPending { .. } => Place::Off,
            _ => Place::Code {
                // PSTATE.M[3:2]: the exception level.
                user: state.regs.pstate >> 2 & 3 == 0,
                pc: state.regs.pc,
            },
        },
        Err(StateError::MidInstruction { .. }) => Place::MidInstruction,
        _ => Place::Unknown,
    }
}

/// The functions and labels of an image, by their first address.
struct Symbols(BTreeMap<u64, (u64, String)>);

impl Symbols {
    /// None, if `file` is not an ELF file or has no symbols.
    fn of(file: &[u8]) -> Self {
        let parsed = ElfBytes::<AnyEndian>::minimal_parse(file).ok();
        let tables = parsed.and_then(|elf| elf.symbol_table().ok().flatten());
        let Some((symbols, names)) = tables else {
            return Self(BTreeMap::new());
        };
        let named = symbols.iter().filter_map(|symbol| {
            // An assembler's label has no type and no size.
            let is_code = matches!(symbol.st_symtype(), STT_FUNC | STT_NOTYPE);
            let name = names.get(symbol.st_name as usize).ok()?;
            let is_named = is_code && symbol.st_shndx != SHN_UNDEF && !name.is_empty();
            let size = if symbol.st_size == 0 {
                LABEL
            } else {
                symbol.st_size
            };
            is_named.then(|| (symbol.st_value, (size, name.to_owned())))
        });
        Self(named.collect())
    }

    fn name(&self, pc: u64) -> String {
        let before = self.0.range(..=pc).next_back();
        let inside = before.filter(|(start, (size, _))| pc - **start < *size);
        match inside {
            Some((_, (_, name))) => name.clone(),
            None => format!("{:#x}", pc & !0xfff),
        }
    }
}

/// The profile for people.
pub fn text(rows: &[ProfileRow]) -> String {
    let samples: u64 = rows.iter().map(|row| row.samples).sum();
    let mut text = format!("profile   {samples} samples, {PERIOD:?} apart\n");
    for row in rows.iter().take(SHOWN) {
        let privilege = row.privilege.unwrap_or("-");
        text.push_str(&format!(
            "  {:5.1} %  {privilege:6}  {}\n",
            row.percent, row.symbol
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_counter_has_the_name_of_its_function() {
        let functions = [
            (0x1000, (0x10, "first".to_owned())),
            (0x1040, (4, "second".to_owned())),
        ];
        let symbols = Symbols(functions.into());
        for (pc, name) in [
            (0x1000, "first"),
            (0x100f, "first"),
            (0x1010, "0x1000"),
            (0x1041, "second"),
            (0xfff, "0x0"),
        ] {
            assert_eq!(symbols.name(pc), name, "{pc:#x}");
        }
        assert!(Symbols::of(b"no ELF file").0.is_empty());
    }
}
