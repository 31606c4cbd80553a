//! The settings of a running VM, and the states of its pages.

use crate::memory::{BUDGET_MIN, Memory};
use crate::vm::Vm;
use lacuna_addr::{BackingRange, GfnRange, HvaRange, PageCount, PageStates};
use lacuna_host::HugePages;
use lacuna_machine::settings::{MemorySettings, Setting, Settings};
use lacuna_machine::{Apf, ApfSwitch};
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Vm {
    pub(crate) fn present_settings(&self) -> Settings {
        let async_faults = match (self.config.apf, self.own_apf) {
            (Apf::Off, _) => Setting::fixed(
                false,
                "the guest was not offered asynchronous page faults: offer them when the VM starts",
            ),
            (_, Some(_)) => Setting::free(self.apf() == Apf::On),
            (_, None) => Setting::fixed(
                true,
                "KVM delivers these events itself, and has no switch for a running guest",
            ),
        };
        Settings {
            async_faults,
            huge_pages: self.memory.huge_setting(),
            detection: Setting::absent("the host's kernel chooses how writes are detected"),
            resident: match self.memory.is_mapped_by_moves() {
                true => Setting::free(self.memory.host.budget()),
                false => Setting::fixed(
                    self.config.memory,
                    "all of the guest's memory is Linux memory: start it with a smaller budget",
                ),
            },
            source_delay: self.memory.delay_setting(),
        }
    }

    pub(crate) fn states_of(&self, gfns: GfnRange) -> PageStates {
        let slots = self.slots.snapshot();
        let slot = slots.find(gfns.start());
        let Some((slot, part)) = slot.and_then(|slot| Some((slot, slot.gfns.intersect(gfns)?)))
        else {
            return PageStates::default();
        };
        let hva = slot.backing_of(part.start());
        let addresses = HvaRange::new(hva, part.pages());
        let addresses = addresses.expect("pages of the slot");
        match slot.attach.is_of_boot() {
            true => self.memory.page_states(addresses),
            false => self.memory.states_by_linux(addresses),
        }
    }
}

impl ApfSwitch for Vm {
    fn apf(&self) -> Apf {
        match self.apf_paused.load(Ordering::Relaxed) {
            true => Apf::Off,
            false => Apf::On,
        }
    }

    fn set_apf(&self, apf: Apf) {
        self.apf_paused.store(apf == Apf::Off, Ordering::Relaxed);
    }
}

impl MemorySettings for Vm {
    fn set_huge_pages(&self, on: bool) {
        self.memory.host.make_huge_pages(on);
    }

    fn set_resident(&self, pages: PageCount) -> Result<(), String> {
        if pages.get() < BUDGET_MIN {
            return Err(format!(
                "{pages} pages are too few: give at least {BUDGET_MIN}"
            ));
        }
        let set = self.memory.host.set_budget(pages);
        set.map_err(|error| error.to_string())
    }

    fn set_source_delay(&self, delay: Duration) {
        self.memory.host.set_delay(delay);
    }
}

impl Memory {
    fn huge_setting(&self) -> Setting<bool> {
        let huge = self.host.makes_huge_pages();
        if !self.is_mapped_by_moves() {
            Setting::fixed(huge, "Linux chooses the size of the pages of its memory")
        } else if self.host.huge_pages() == HugePages::Never {
            Setting::fixed(
                huge,
                "the memory was made for 4 KiB pages: start the VM with huge pages, and switch \
                 them off",
            )
        } else {
            Setting::free(huge)
        }
    }

    fn delay_setting(&self) -> Setting<Duration> {
        if self.handler().is_some() {
            Setting::absent("a handler fills the memory from outside: delay the handler")
        } else if self.is_filled_by_linux() {
            Setting::absent("there is neither a swap device nor a page source")
        } else {
            Setting::free(self.host.delay())
        }
    }

    /// Counts the pages at `addresses`, of the boot layout.
    fn page_states(&self, addresses: HvaRange) -> PageStates {
        if self.is_filled_by_linux() || self.handler().is_some() {
            return self.states_by_linux(addresses);
        }
        let first = self.page(addresses.start());
        let range = first.and_then(|page| BackingRange::new(self.backing(page), addresses.pages()));
        range.map_or_else(PageStates::default, |range| self.host.page_states(range))
    }

    /// Counts the pages at `addresses` by the page table of this process. Pages in Linux's swap
    /// count as untouched.
    fn states_by_linux(&self, addresses: HvaRange) -> PageStates {
        let present = self.present(addresses).unwrap_or(0);
        PageStates {
            resident: present,
            untouched: addresses.pages() - present.min(addresses.pages()),
            ..PageStates::default()
        }
    }
}
