//! The memory slots of a VM: which guest addresses are where in a memory file.

use crate::error::OffloadError;
use crate::frame::MemoryRange;
use lacuna_addr::PAGE_SIZE;
use serde::{Deserialize, Serialize};

/// The most slots. KVM has 32764, but each slot here has a descriptor, and Linux gives a process
/// 1024 by default.
pub const SLOTS_MAX: usize = 512;
/// The most memory, twice the largest slot of KVM: files of Linux have no room for much more.
const MEMORY_MAX: u64 = 16 << 40;
/// The end of guest addresses, which have at most 52 bits.
const GPA_END: u64 = 1 << 52;

/// A memory slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Slot {
    /// Its number.
    pub slot: u32,
    /// Its first guest address.
    pub gpa: u64,
    /// Bytes.
    pub length: u64,
    /// Where it begins in the VMM's memory file, in bytes. Slots of one zone share a file.
    pub fd_offset: u64,
    /// Where it begins in the snapshot's memory file, in bytes.
    pub offset: u64,
}

/// All slots of a VM, by guest address. No two overlap, neither in guest addresses nor in the
/// snapshot's memory file, and each is whole pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slots(Vec<Slot>);

/// What is read of a VM's configuration. Other fields belong to the VMM alone.
#[derive(Deserialize)]
struct MigrationConfig {
    memory_manager_data: MemoryManagerData,
}

#[derive(Deserialize)]
struct MemoryManagerData {
    guest_ram_mappings: Vec<RamMapping>,
}

#[derive(Deserialize)]
struct RamMapping {
    slot: u32,
    gpa: u64,
    size: u64,
    file_offset: u64,
    #[serde(default)]
    virtio_mem: bool,
}

impl Slots {
    /// The slots of the VM with this configuration. Their contents are put one behind the other
    /// into the snapshot's memory file.
    ///
    /// # Errors
    /// The configuration has no slots, or unusable ones.
    pub fn of_config(json: &[u8]) -> Result<Self, OffloadError> {
        let config: MigrationConfig = serde_json::from_slice(json).map_err(|error| {
            let what = "it is no JSON with memory_manager_data.guest_ram_mappings";
            OffloadError::Unusable(format!("{what} ({error}); use Cloud Hypervisor v53"))
        })?;
        let mut mappings = config.memory_manager_data.guest_ram_mappings;
        if let Some(found) = mappings.iter().find(|mapping| mapping.virtio_mem) {
            let slot = found.slot;
            return Err(OffloadError::Unusable(format!(
                "slot {slot} is virtio-mem, whose plugged blocks the protocol does not carry: use \
                 a VM without virtio-mem"
            )));
        }
        mappings.sort_by_key(|mapping| mapping.gpa);
        let mut offset = 0u64;
        let slots = mappings.iter().map(|mapping| {
            let slot = Slot {
                slot: mapping.slot,
                gpa: mapping.gpa,
                length: mapping.size,
                fd_offset: mapping.file_offset,
                offset,
            };
            // The check below refuses an overflow, because its slot is too long.
            offset = offset.saturating_add(mapping.size);
            slot
        });
        Self::checked(slots.collect()).map_err(OffloadError::Unusable)
    }

    /// Checks slots, in ascending order of guest addresses.
    ///
    /// # Errors
    /// Why they cannot be a VM's memory.
    pub fn checked(slots: Vec<Slot>) -> Result<Self, String> {
        if !(1..=SLOTS_MAX).contains(&slots.len()) {
            let count = slots.len();
            return Err(format!(
                "it has {count} memory slots, and 1 to {SLOTS_MAX} can be"
            ));
        }
        let (mut gpa_end, mut end) = (0, 0u64);
        for one in &slots {
            let Slot {
                slot,
                gpa,
                length,
                fd_offset,
                offset,
            } = *one;
            let whole = [gpa, length, fd_offset].map(|n| n.is_multiple_of(PAGE_SIZE as u64));
            if length == 0 || whole.contains(&false) {
                return Err(format!("slot {slot} is not whole pages of 4 KiB"));
            }
            if length > MEMORY_MAX - end || fd_offset > MEMORY_MAX - length {
                return Err(format!("its memory has more than {MEMORY_MAX} bytes"));
            }
            if gpa < gpa_end || gpa > GPA_END - length {
                return Err(format!(
                    "slot {slot} overlaps another one, or has no such addresses"
                ));
            }
            if offset != end {
                return Err(format!("slot {slot} is not at {end} in the memory file"));
            }
            (gpa_end, end) = (gpa + length, end + length);
        }
        let mut numbers: Vec<_> = slots.iter().map(|slot| slot.slot).collect();
        numbers.sort_unstable();
        if let Some(two) = numbers.windows(2).find(|two| two[0] == two[1]) {
            return Err(format!(
                "two of its memory slots have the number {}",
                two[0]
            ));
        }
        Ok(Self(slots))
    }

    /// The slots, by guest address.
    pub fn all(&self) -> &[Slot] {
        &self.0
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.0.last().map_or(0, |slot| slot.offset + slot.length)
    }

    /// The offset of `range` in the snapshot's memory file.
    ///
    /// # Errors
    /// It is not whole pages of one slot.
    pub fn locate(&self, range: MemoryRange) -> Result<u64, String> {
        let MemoryRange { gpa, length } = range;
        let after = self.0.partition_point(|slot| slot.gpa <= gpa);
        let slot = after.checked_sub(1).map(|at| &self.0[at]);
        let slot = slot.filter(|slot| {
            let at = gpa - slot.gpa;
            at < slot.length && length <= slot.length - at
        });
        let whole = [gpa, length].map(|n| n.is_multiple_of(PAGE_SIZE as u64));
        match slot {
            Some(slot) if length > 0 && whole == [true, true] => Ok(slot.offset + (gpa - slot.gpa)),
            Some(_) => Err(format!(
                "the {length} bytes at {gpa:#x} are not whole pages of 4 KiB"
            )),
            None => Err(format!(
                "the {length} bytes at {gpa:#x} are in no memory slot"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(mappings: &str) -> Result<Slots, String> {
        let json = format!(
            r#"{{"vm_config": {{"cpus": []}}, "memory_manager_data":
            {{"guest_ram_mappings": [{mappings}], "boot_ram": 1}}}}"#
        );
        Slots::of_config(json.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn slots_of_a_configuration() {
        let high = r#"{"slot": 1, "gpa": 4294967296, "size": 8192, "file_offset": 4096}"#;
        let low = r#"{"slot": 7, "gpa": 0, "size": 4096, "file_offset": 0, "zone_id": "z"}"#;
        let slots = config(&format!("{high}, {low}")).unwrap();
        assert_eq!(slots.bytes(), 12288);
        let numbers: Vec<_> = slots.all().iter().map(|s| (s.slot, s.offset)).collect();
        assert_eq!(numbers, [(7, 0), (1, 4096)]);
        let locate = |gpa, length| slots.locate(MemoryRange { gpa, length });
        assert_eq!(locate(0, 4096), Ok(0));
        assert_eq!(locate((4 << 30) + 4096, 4096), Ok(8192));
        for (gpa, length) in [
            (0, 8192),
            (4096, 4096),
            (4 << 30, 12288),
            (u64::MAX - 4095, 4096),
            (0, u64::MAX - 4095),
        ] {
            assert!(locate(gpa, length).unwrap_err().contains("in no memory"));
        }
        for (gpa, length) in [(1, 1), (0, 1), (0, 0)] {
            assert!(locate(gpa, length).unwrap_err().contains("whole pages"));
        }
    }

    #[test]
    fn unusable_configurations() {
        let slot = |slot: u32, gpa: u64, size: u64| {
            format!(r#"{{"slot": {slot}, "gpa": {gpa}, "size": {size}, "file_offset": 0}}"#)
        };
        let two = |a: String, b: String| format!("{a}, {b}");
        let big = 1 << 43;
        for (mappings, reason) in [
            (String::new(), "0 memory slots"),
            (slot(0, 0, 100), "not whole pages"),
            (slot(0, 0, 0), "not whole pages"),
            (slot(0, 1 << 52, 4096), "no such addresses"),
            (slot(0, 0, 1 << 60), "more than"),
            (two(slot(0, 0, 8192), slot(1, 4096, 4096)), "overlaps"),
            (two(slot(3, 0, 4096), slot(3, 4096, 4096)), "number 3"),
            (
                two(
                    slot(0, 0, big),
                    two(slot(1, big, big), slot(2, 2 * big, 4096)),
                ),
                "more than",
            ),
            (
                r#"{"slot": 0, "gpa": 0, "size": 4096}"#.into(),
                "missing field `file_offset`",
            ),
            (
                r#"{"slot": 0, "gpa": 0, "size": 4096, "file_offset": 0, "virtio_mem": true}"#
                    .into(),
                "virtio-mem",
            ),
        ] {
            let error = config(&mappings).unwrap_err();
            assert!(error.contains(reason), "{mappings}: {error}");
        }
        let error = Slots::of_config(b"{}").unwrap_err().to_string();
        assert!(error.contains("memory_manager_data"), "{error}");
    }
}
