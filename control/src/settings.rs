//! The messages about a VM's settings and about the states of its pages.

use crate::detection;
use lacuna::dirty::Detection;
use serde::{Deserialize, Serialize};

/// A client's change of a VM's settings. `None` leaves a setting unchanged.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRequest {
    /// Whether the guest gets asynchronous page faults.
    pub async_faults: Option<bool>,
    /// Whether faults and collapse make huge pages.
    pub huge_pages: Option<bool>,
    /// How writes are detected while they are logged.
    #[serde(default, with = "detection")]
    pub detect: Option<Detection>,
    /// How many bytes of the guest's memory may be in the host's memory.
    pub resident_bytes: Option<u64>,
    /// The delay added to each transfer of the swap device and to each request to the page source,
    /// in microseconds.
    pub source_delay_us: Option<u64>,
}

/// The settings of a running VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// As [`SetRequest::async_faults`].
    pub async_faults: Setting<bool>,
    /// As [`SetRequest::huge_pages`].
    pub huge_pages: Setting<bool>,
    /// As [`SetRequest::detect`].
    #[serde(with = "detection_setting")]
    pub detect: Setting<Detection>,
    /// As [`SetRequest::resident_bytes`].
    pub resident_bytes: Setting<u64>,
    /// As [`SetRequest::source_delay_us`].
    pub source_delay_us: Setting<u64>,
}

/// A setting of a running VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Setting<T> {
    /// The value at present; null if this VM has nothing to set.
    pub value: Option<T>,
    /// Why it cannot be changed here; missing if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed: Option<String>,
}

impl<T> Setting<T> {
    /// A setting of the library, with its value in the unit of the messages.
    fn of<L>(setting: lacuna::settings::Setting<L>, in_unit: impl FnOnce(L) -> T) -> Self {
        Self {
            value: setting.value.map(in_unit),
            fixed: setting.fixed.map(Into::into),
        }
    }
}

impl From<lacuna::settings::Settings> for Settings {
    fn from(now: lacuna::settings::Settings) -> Self {
        Self {
            async_faults: Setting::of(now.async_faults, |on| on),
            huge_pages: Setting::of(now.huge_pages, |on| on),
            detect: Setting::of(now.detection, |detection| detection),
            resident_bytes: Setting::of(now.resident, |pages| pages.bytes()),
            source_delay_us: Setting::of(now.source_delay, |delay| delay.as_micros() as u64),
        }
    }
}

/// Which map a client asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MapRequest {
    /// The most cells.
    pub cells: u32,
}

/// A [`PageMap`] in JSON: a cell is an array of its counts.
pub(crate) mod page_map {
    use lacuna::memory::{PageMap, PageStates};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Map {
        pages_per_cell: u64,
        cells: Vec<[u64; 6]>,
    }

    pub fn serialize<S: Serializer>(map: &PageMap, to: S) -> Result<S::Ok, S::Error> {
        Map {
            pages_per_cell: map.pages_per_cell,
            cells: map.cells.iter().map(PageStates::counts).collect(),
        }
        .serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PageMap, D::Error> {
        let map = Map::deserialize(from)?;
        Ok(PageMap {
            pages_per_cell: map.pages_per_cell,
            cells: map.cells.into_iter().map(PageStates::of_counts).collect(),
        })
    }
}

/// A [`Setting`] of a [`Detection`], by its name in JSON.
mod detection_setting {
    use super::Setting;
    use crate::detection::Named;
    use lacuna::dirty::Detection;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(
        setting: &Setting<Detection>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let Setting { value, fixed } = setting.clone();
        let value = value.map(Named);
        Setting { value, fixed }.serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Setting<Detection>, D::Error> {
        let Setting { value, fixed } = Setting::<Named>::deserialize(from)?;
        let value = value.map(|Named(value)| value);
        Ok(Setting { value, fixed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_what_the_documentation_says() {
        let settings = Settings {
            async_faults: Setting {
                value: Some(true),
                fixed: Some("why".into()),
            },
            huge_pages: Setting {
                value: Some(false),
                fixed: None,
            },
            detect: Setting {
                value: Some(Detection::WriteProtect),
                fixed: None,
            },
            resident_bytes: Setting {
                value: Some(4096),
                fixed: None,
            },
            source_delay_us: Setting {
                value: None,
                fixed: Some("none".into()),
            },
        };
        let line = r#"{"async_faults":{"value":true,"fixed":"why"},"huge_pages":{"value":false},"#;
        let line = line.to_owned()
            + r#""detect":{"value":"wp"},"resident_bytes":{"value":4096},"#
            + r#""source_delay_us":{"value":null,"fixed":"none"}}"#;
        assert_eq!(serde_json::to_string(&settings).unwrap(), line);
        assert_eq!(serde_json::from_str::<Settings>(&line).unwrap(), settings);
    }
}
