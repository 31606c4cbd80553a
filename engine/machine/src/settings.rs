//! What a VMM may change while a VM runs: each value, and why it may be fixed.

use crate::{Apf, Detection, ErrorKind, Vm};
use lacuna_addr::PageCount;
use std::time::Duration;

/// The longest added delay of a page source or swap device.
const DELAY_MAX: Duration = Duration::from_secs(60);

/// A setting of a running VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting<T> {
    /// The value at present; `None` if this VM has nothing to set.
    pub value: Option<T>,
    /// Why it cannot be changed here; `None` if it can.
    pub fixed: Option<&'static str>,
}

impl<T> Setting<T> {
    /// A setting that can be changed.
    pub fn free(value: T) -> Self {
        Self {
            value: Some(value),
            fixed: None,
        }
    }

    /// A setting that cannot be changed, and why.
    pub fn fixed(value: T, why: &'static str) -> Self {
        Self {
            value: Some(value),
            fixed: Some(why),
        }
    }

    /// A setting that this VM does not have, and why.
    pub fn absent(why: &'static str) -> Self {
        Self {
            value: None,
            fixed: Some(why),
        }
    }
}

/// The settings of a running VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Whether a guest that has enabled asynchronous page faults gets page-not-present. Tokens in
    /// flight are not affected: the guest gets page-ready for each.
    pub async_faults: Setting<bool>,
    /// Whether faults and collapse make huge pages. Existing ones stay until reclaim splits them.
    pub huge_pages: Setting<bool>,
    /// How writes are detected while a slot logs.
    pub detection: Setting<Detection>,
    /// How many pages of the guest may be in the host's memory. VMs that share a host share it.
    pub resident: Setting<PageCount>,
    /// A delay added to each transfer of the swap device and to each request to the page source,
    /// to test or to show a slow one. At most a minute.
    pub source_delay: Setting<Duration>,
}

/// A change of [`Settings`]; `None` leaves a value unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SettingsChange {
    /// [`Settings::async_faults`].
    pub async_faults: Option<bool>,
    /// [`Settings::huge_pages`].
    pub huge_pages: Option<bool>,
    /// [`Settings::detection`].
    pub detection: Option<Detection>,
    /// [`Settings::resident`].
    pub resident: Option<PageCount>,
    /// [`Settings::source_delay`].
    pub source_delay: Option<Duration>,
}

/// Why a change of settings was refused. Nothing has changed then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{setting}: {why}")]
pub struct SettingError {
    /// The field of [`Settings`].
    pub setting: &'static str,
    /// Why, and what to do.
    pub why: String,
}

impl SettingError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        ErrorKind::Request
    }
}

/// The settings of a VM's memory, which [`Vm::change_settings`] changes after its checks.
pub trait MemorySettings {
    /// Sets [`Settings::huge_pages`].
    fn set_huge_pages(&self, on: bool);

    /// Sets [`Settings::resident`].
    ///
    /// # Errors
    /// The number is too small for the VM's vCPUs, or larger than at the VM's start.
    fn set_resident(&self, pages: PageCount) -> Result<(), String>;

    /// Sets [`Settings::source_delay`].
    fn set_source_delay(&self, delay: Duration);
}

/// See [`Vm::change_settings`].
pub(crate) fn change(vm: &impl Vm, change: &SettingsChange) -> Result<Settings, SettingError> {
    let now = vm.settings();
    check("async_faults", &now.async_faults, change.async_faults)?;
    check("huge_pages", &now.huge_pages, change.huge_pages)?;
    check("detection", &now.detection, change.detection)?;
    check("resident", &now.resident, change.resident)?;
    check("source_delay", &now.source_delay, change.source_delay)?;
    if let Some(delay) = change.source_delay.filter(|delay| *delay > DELAY_MAX) {
        let why = format!("{delay:?} is too long: give at most {DELAY_MAX:?}");
        let setting = "source_delay";
        return Err(SettingError { setting, why });
    }
    // The only change that may be refused is the first one.
    let memory = vm.memory_settings();
    if let Some(pages) = change.resident {
        let setting = "resident";
        let refused = |why| SettingError { setting, why };
        memory.set_resident(pages).map_err(refused)?;
    }
    if let Some(on) = change.huge_pages {
        memory.set_huge_pages(on);
    }
    if let Some(delay) = change.source_delay {
        memory.set_source_delay(delay);
    }
    if let Some((switch, on)) = vm.apf_switch().zip(change.async_faults) {
        switch.set_apf(if on { Apf::On } else { Apf::Off });
    }
    if let Some((choice, detection)) = vm.detection().zip(change.detection) {
        choice.choose(detection);
    }
    Ok(vm.settings())
}

/// Refuses `change` of a fixed setting.
fn check<T>(
    setting: &'static str,
    now: &Setting<T>,
    change: Option<T>,
) -> Result<(), SettingError> {
    match (now.fixed, change) {
        (Some(why), Some(_)) => Err(SettingError {
            setting,
            why: why.into(),
        }),
        _ => Ok(()),
    }
}
