//! Settings that clients change while the guest runs, and maps of its memory.

use super::Controlled;
use crate::refused::Refused;
use crate::settings::{MapRequest, SetRequest, Settings};
use lacuna::memory::PageMap;
use lacuna::settings::{SettingError, SettingsChange};
use lacuna::{PAGE_SIZE, PageCount, Vm};
use std::time::Duration;

/// The most cells of a map.
const CELLS_MAX: u32 = 4096;

impl<V: Vm> Controlled<'_, V> {
    pub(super) fn settings(&self) -> Settings {
        self.vm.settings().into()
    }

    /// Changes settings, all or none of them.
    pub(super) fn set(&self, request: &SetRequest) -> Result<Settings, Refused> {
        if let Some(ending) = self.devices.ending() {
            return Err(Refused::request(format!("the run is over: {ending}")));
        }
        // The lock is held until the change: a monitor that begins or ends meanwhile chooses too.
        let monitor = self.monitor();
        let is_chosen = monitor.as_ref().is_some_and(|monitor| monitor.detects);
        if request.detect.is_some() && is_chosen {
            return Err(Refused::request(
                "detect: a client that watches the guest's writes has chosen how they are \
                 detected: wait until it has disconnected",
            ));
        }
        let pages = request.resident_bytes.map(pages).transpose()?;
        let change = SettingsChange {
            async_faults: request.async_faults,
            huge_pages: request.huge_pages,
            detection: request.detect,
            resident: pages,
            source_delay: request.source_delay_us.map(Duration::from_micros),
        };
        let changed = self.vm.change_settings(&change).map_err(refused)?;
        Ok(changed.into())
    }

    pub(super) fn map(&self, MapRequest { cells }: MapRequest) -> Result<PageMap, Refused> {
        if !(1..=CELLS_MAX).contains(&cells) {
            return Err(Refused::request(format!(
                "cells {cells}: give 1 to {CELLS_MAX}"
            )));
        }
        Ok(self.vm.page_map(cells as usize))
    }
}

fn pages(bytes: u64) -> Result<PageCount, Refused> {
    match bytes.is_multiple_of(PAGE_SIZE as u64) {
        true => Ok(PageCount::from_bytes(bytes)),
        false => Err(Refused::request(format!(
            "resident_bytes {bytes}: give a multiple of {PAGE_SIZE}"
        ))),
    }
}

/// The refusal, by the name of the request's field.
fn refused(error: SettingError) -> Refused {
    let field = match error.setting {
        "detection" => "detect",
        "resident" => "resident_bytes",
        "source_delay" => "source_delay_us",
        same => same,
    };
    Refused::of(error.kind(), format_args!("{field}: {}", error.why))
}
