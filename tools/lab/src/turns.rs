//! The order in which arms take turns. It holds for slices of one VM and for several VMs.
//!
//! ```text
//! round      a b c c b a     there and back: a linear drift cancels
//! pairs      a b c c b a  b c a a c b  ...     each time another arm first
//! shifts     arm a on VM 0, 1, 2: differences between the VMs cancel
//! ```

/// All rotations of `count` arms over as many VMs. In the rotation `shift`, VM `shift[arm]` plays
/// `arm`.
pub fn shifts(count: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..count).map(move |shift| (0..count).map(|arm| (arm + shift) % count).collect())
}

/// Whether a turn is the last of its round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Last {
    /// It is the last.
    Yes,
    /// More turns of the round follow.
    No,
}

/// Calls `turn` for each turn of a round. A round is the turns of all arms, there and back, `pairs`
/// times. Each time another arm is first, because an arm with two turns in a row finds its caches
/// warm.
pub fn round<E>(
    arms: usize,
    pairs: usize,
    mut turn: impl FnMut(usize, Last) -> Result<(), E>,
) -> Result<(), E> {
    for pair in 0..pairs {
        let order = (0..arms).map(|place| (pair + place) % arms);
        for arm in order.clone() {
            turn(arm, Last::No)?;
        }
        let last = if pair + 1 == pairs {
            Last::Yes
        } else {
            Last::No
        };
        for arm in order.rev() {
            turn(arm, last)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_goes_there_and_back_and_begins_with_another_each_time() {
        let mut turns = Vec::new();
        let done: Result<(), ()> = round(3, 3, |arm, last| {
            turns.push((arm, last));
            Ok(())
        });
        done.unwrap();
        let arms: Vec<_> = turns.iter().map(|turn| turn.0).collect();
        assert_eq!(arms[..6], [0, 1, 2, 2, 1, 0]);
        assert_eq!(arms[6..], [1, 2, 0, 0, 2, 1, 2, 0, 1, 1, 0, 2]);
        let last: Vec<_> = turns.iter().map(|turn| turn.1 == Last::Yes).collect();
        assert_eq!(last, [[false; 15].as_slice(), &[true; 3]].concat());
    }

    #[test]
    fn every_vm_plays_every_arm() {
        let mut played = [[0; 3]; 3];
        for vms in shifts(3) {
            vms.iter()
                .enumerate()
                .for_each(|(arm, vm)| played[arm][*vm] += 1);
        }
        assert_eq!(played, [[1; 3]; 3]);
    }
}
