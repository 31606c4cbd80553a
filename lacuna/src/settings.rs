//! What a VMM may change while a guest runs: asynchronous page faults, huge pages, the detection of
//! writes, the resident budget, and an added delay of its pages. Any thread may change them, in any
//! order, by [`Vm::change_settings`](crate::Vm::change_settings).
//!
//! ```
//! use lacuna::settings::SettingsChange;
//! use lacuna::{Builder, PageCount, Vm, soft};
//!
//! let size = PageCount::from_bytes(16 << 20);
//! let vm = soft::VmBuilder::new(size, size).build()?;
//! let change = SettingsChange {
//!     resident: Some(PageCount::from_bytes(8 << 20)),
//!     ..SettingsChange::default()
//! };
//! let now = vm.change_settings(&change)?;
//! assert_eq!(now.resident.value, change.resident);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use lacuna_machine::settings::{
    MemorySettings, Setting, SettingError, Settings, SettingsChange,
};
