//! Regions are removed while vCPUs use them.

use super::THREADS;
use super::vcpu::{Fixture, Polls, add_region};
use lacuna_addr::PageCount;
use lacuna_host::{HostConfig, HostError, HugePages, MemoryStore};
use lacuna_sync::HostClock;
use std::sync::Arc;
use std::time::Duration;

/// Regions are removed under vCPUs that use them, while others need the frames. An early vCPU finds
/// its bytes; a late one finds the page lost.
#[test]
fn three_vcpus_while_their_regions_are_removed() {
    for (round, huge) in [HugePages::Never, HugePages::Always]
        .repeat(15)
        .iter()
        .enumerate()
    {
        let config = |clock: Arc<HostClock>| HostConfig {
            budget: PageCount::new(4 * 512),
            huge: *huge,
            swap: Box::new(MemoryStore::new()),
            io: THREADS,
            clock,
        };
        let fixture = Fixture::new(config, 3 * 512 + 10, Polls::Never);
        std::thread::scope(|scope| {
            let vcpus: Vec<_> = (0..3)
                .map(|first| {
                    let vcpu = fixture.vcpu(first);
                    scope.spawn(move || vcpu.try_run(usize::MAX))
                })
                .collect();
            std::thread::sleep(Duration::from_millis(5 + round as u64 % 7));
            fixture.host.remove_region(fixture.range).unwrap();
            let (stage2, range) = add_region(&fixture.host, 3 * 512);
            let mut heir = fixture.vcpu(0);
            (heir.stage2, heir.range, heir.step) = (stage2, range, 1);
            heir.run(5000);
            for vcpu in vcpus {
                let end = vcpu.join().unwrap();
                assert!(matches!(end, Err(HostError::Lost(_))), "{end:?}");
            }
            fixture.host.remove_region(range).unwrap();
        });
        assert!(
            !fixture.stage2.maps_something(),
            "{huge:?}: frames that are free"
        );
        fixture.host.verify();
        assert_eq!(fixture.host.stats().resident, 0);
    }
}
