//! The machine that a figure was measured on.

use std::fmt;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The properties of the machine that a reader needs to judge a figure.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostInfo {
    /// Processor, as the kernel names it.
    pub cpu: String,
    /// Processors that this process may run on.
    pub cores: usize,
    /// Kernel release.
    pub kernel: String,
    /// Memory of the machine in bytes; 0 where `/proc/meminfo` cannot be read.
    pub memory_bytes: u64,
    /// When this was read: UTC, ISO 8601, to the second.
    pub date: String,
}

impl HostInfo {
    /// Describes this machine. An unreadable value is `unknown` and no error, because a report
    /// without the processor's name is better than none.
    pub fn detect() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease");
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            cpu: field(&cpuinfo, "model name")
                .unwrap_or("unknown")
                .to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: kernel.map_or("unknown".into(), |release| release.trim().to_owned()),
            memory_bytes: kib(&meminfo, "MemTotal").unwrap_or(0),
            date: iso_8601(since_epoch.as_secs()),
        }
    }
}

impl fmt::Display for HostInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.memory_bytes as f64 / (1_u64 << 30) as f64;
        let (cpu, cores, kernel, date) = (&self.cpu, self.cores, &self.kernel, &self.date);
        write!(
            f,
            "{cpu}, {cores} cores, {gib:.1} GiB, Linux {kernel}, {date}"
        )
    }
}

/// The value of `name` in a `name : value` file of `/proc`; the first where there are several.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The value of `name` in a file like `/proc/meminfo`, in bytes.
pub fn kib(text: &str, name: &str) -> Option<u64> {
    let number: u64 = field(text, name)?.strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

/// `seconds` since 1970 as `2026-01-31T23:59:59Z`.
fn iso_8601(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Years begin in March, so a leap day is the last of its year. 719 468 days before 1970 a
    // period of 400 years began.
    let (era, day) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let year = era * 400 + year + u64::from(month >= 10);
    let month = if month < 10 { month + 3 } else { month - 9 };
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(iso_8601(seconds), date);
        }
    }

    #[test]
    fn proc_fields() {
        let text = "processor\t: 0\nmodel name\t: Some CPU\nMemTotal:       24553 kB\n";
        assert_eq!(field(text, "model name"), Some("Some CPU"));
        assert_eq!(kib(text, "MemTotal"), Some(24553 * 1024));
        assert_eq!(kib(text, "model name"), None);
        assert_eq!(field(text, "model"), None);
    }
}
