//! The settings of a running VM, and the states of its pages.

use crate::vm::Vm;
use lacuna_addr::{BackingRange, GfnRange, PageCount, PageStates};
use lacuna_host::{Host, HostError, SharedMemory};
use lacuna_machine::settings::{MemorySettings, Setting, Settings};
use lacuna_machine::{Apf, DetectionChoice as _};
use std::time::Duration;

impl Vm {
    pub(crate) fn present_settings(&self) -> Settings {
        let async_faults = match self.config.apf {
            Apf::Off => Setting::fixed(
                false,
                "the guest was not offered asynchronous page faults: offer them when the VM starts",
            ),
            _ => Setting::free(self.apf() == Apf::On),
        };
        let huge = self.host.makes_huge_pages();
        Settings {
            async_faults,
            huge_pages: match self.backing {
                None => Setting::free(huge),
                Some(_) => {
                    Setting::fixed(huge, "Linux chooses the size of the pages of its memory")
                }
            },
            detection: Setting::free(self.current()),
            resident: self.resident_setting(),
            source_delay: self.delay_setting(),
        }
    }

    fn resident_setting(&self) -> Setting<PageCount> {
        match &self.backing {
            None => Setting::free(self.host.budget()),
            Some(_) if self.shared_memory().is_some_and(SharedMemory::is_huge) => Setting::fixed(
                self.config.memory,
                "huge pages of hugetlbfs cannot leave the host's memory",
            ),
            Some(_) => Setting::free(self.host.linux_limit().min(self.config.memory)),
        }
    }

    fn delay_setting(&self) -> Setting<Duration> {
        let is_external = |source: &dyn lacuna_machine::PageSource| source.external().is_some();
        match &self.source {
            Some(source) if is_external(&**source) => {
                Setting::absent("a handler fills the memory from outside: delay the handler")
            }
            None if self.backing.is_some() => {
                Setting::absent("Linux pages this memory, and there is no page source")
            }
            _ => Setting::free(self.host.delay()),
        }
    }

    pub(crate) fn states_of(&self, gfns: GfnRange) -> PageStates {
        let slots = self.mmu.slots();
        let slot = slots.find(gfns.start());
        let range = slot.and_then(|slot| {
            let part = slot.gfns.intersect(gfns)?;
            BackingRange::new(slot.backing_of(part.start()), part.pages())
        });
        range.map_or_else(PageStates::default, |range| self.host.page_states(range))
    }
}

impl MemorySettings for Vm {
    fn set_huge_pages(&self, on: bool) {
        self.host.make_huge_pages(on);
    }

    fn set_resident(&self, pages: PageCount) -> Result<(), String> {
        if self.backing.is_some() {
            let (vcpus, minimum) = (self.config.vcpus, Host::minimum_budget(self.config.vcpus));
            if pages < minimum {
                return Err(HostError::BudgetTooSmall {
                    budget: pages,
                    vcpus,
                    minimum,
                }
                .to_string());
            }
            self.host.limit_linux(pages);
            return Ok(());
        }
        self.host
            .set_budget(pages)
            .map_err(|error| error.to_string())
    }

    fn set_source_delay(&self, delay: Duration) {
        self.host.set_delay(delay);
    }
}
