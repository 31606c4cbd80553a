//! Accesses of devices, and of registers that the machine answers (x86: KVM's MSRs): the division
//! of an access, and the answers to an instruction.

use lacuna_addr::{Gpa, aligned_piece};

/// The device and register accesses of the current instruction so far.
///
/// An instruction that touches a device, or a register that the machine answers, leaves the
/// processor. After the answer, it is executed again from its start. It may make several such
/// accesses, so the answers are kept in order until it completes.
#[derive(Clone, Debug)]
pub struct Replay {
    replies: [u64; Replay::MAX],
    known: usize,
    next: usize,
    /// The instruction waits for an answer.
    asked: bool,
}

impl Default for Replay {
    fn default() -> Self {
        Self {
            replies: [0; Self::MAX],
            known: 0,
            next: 0,
            asked: false,
        }
    }
}

impl Replay {
    /// More accesses than one instruction makes. x86's ENTER with 31 levels makes the most: about
    /// 70, because it copies 31 adjacent frame pointers. One read and one write of these may cross
    /// two pages, and is then divided.
    const MAX: usize = 128;

    /// Whether answers wait for the current instruction.
    pub fn is_active(&self) -> bool {
        self.known > 0
    }

    /// Whether no instruction waits for an answer or holds one.
    pub fn is_idle(&self) -> bool {
        self.known == 0 && !self.asked
    }

    /// The instruction starts again: its answers are read from the first.
    pub fn rewind(&mut self) {
        self.next = 0;
    }

    /// The instruction is complete.
    pub fn clear(&mut self) {
        (self.known, self.next, self.asked) = (0, 0, false);
    }

    /// Adds the answer to the last exit.
    pub fn push(&mut self, value: u64) {
        self.asked = false;
        if let Some(slot) = self.replies.get_mut(self.known) {
            *slot = value;
            self.known += 1;
        }
    }

    /// As [`Replay::push`], if the instruction waits for an answer. Otherwise the next access,
    /// perhaps a write, would take the value as its answer, and the device would not see that
    /// access.
    pub fn answer(&mut self, value: u64) {
        if self.asked {
            self.push(value);
        }
    }

    /// The processor is entered. An unanswered question will be asked again: the instruction has no
    /// answer yet, so it is executed from its start, perhaps after an interrupt.
    pub fn enter(&mut self) {
        self.asked &= self.is_active();
    }

    /// The next answer, in the order of the accesses. Without one, the instruction must leave and
    /// ask.
    pub fn take(&mut self) -> Option<u64> {
        let reply = (self.next < self.known).then(|| self.replies[self.next]);
        self.next += usize::from(reply.is_some());
        self.asked = reply.is_none();
        reply
    }
}

/// The device accesses that make up one access of `bytes` at `gpa`: for each, the bytes before it
/// and its size. A device access has 1, 2, 4 or 8 bytes. If an access crosses two pages, its part
/// in one page may have another size, such as 3 bytes, and is divided.
pub fn device_pieces(gpa: Gpa, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let (at, left) = (done, bytes - done);
        let size = match left {
            0 => return None,
            1 | 2 | 4 | 8 => left,
            _ => aligned_piece(gpa.offset() + done, left),
        };
        done += size;
        Some((at, size))
    })
}

/// The address `bytes` behind `gpa`, in the same page.
pub fn after(gpa: Gpa, bytes: usize) -> Gpa {
    Gpa::truncate(gpa.get() + bytes as u64)
}

/// The low 1 to 8 bytes of `value`.
pub fn low_bytes(value: u64, bytes: usize) -> u64 {
    value & (u64::MAX >> (64 - 8 * bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_are_powers_of_two_and_add_up() {
        for (offset, bytes) in (0..4096).flat_map(|at| (1..=8).map(move |bytes| (at, bytes))) {
            if offset + bytes > 4096 {
                continue;
            }
            let pieces: Vec<_> = device_pieces(Gpa::truncate(offset as u64), bytes).collect();
            let mut next = 0;
            for &(done, size) in &pieces {
                assert_eq!((done, size.is_power_of_two()), (next, true));
                next += size;
            }
            assert_eq!(next, bytes);
            assert!(pieces.len() == 1 || !bytes.is_power_of_two());
        }
    }

    #[test]
    fn an_answer_without_a_question_is_ignored() {
        let mut replay = Replay::default();
        replay.answer(1);
        assert!(replay.is_idle());
        assert_eq!(replay.take(), None);
        replay.answer(2);
        replay.answer(3);
        replay.rewind();
        assert_eq!((replay.take(), replay.take()), (Some(2), None));
    }

    #[test]
    fn a_question_ends_when_the_processor_goes_on_without_an_answer() {
        let mut replay = Replay::default();
        assert_eq!(replay.take(), None);
        replay.enter();
        replay.answer(1);
        assert!(replay.is_idle());
    }
}
