//! `lacuna doctor`: what this host can do, what is missing, and how to get it.
//!
//! Each check tries the thing itself where it can: it opens, sets up or writes. Settings alone do
//! not say what a container allows. A check changes nothing and needs no privilege. The soft
//! backend needs only `memory` and `swap`; it can use the others, or the kvm backend needs them.

mod checks;

use std::fmt::Write;
use std::path::Path;

use lacuna_lab::host_info::HostInfo;
use lacuna_lab::result::{SCHEMA, to_json};
use serde::Serialize;

/// How well the host does at one thing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The host has all that Lacuna can use.
    Ok,
    /// The host has it, but with less than Lacuna can use.
    Limited,
    /// The host lacks it.
    Missing,
}

/// One thing a host can do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Check {
    /// Stable name, for scripts.
    pub id: &'static str,
    /// How well.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What to do about it, if it is not [`State::Ok`].
    pub advice: Option<String>,
}

impl Check {
    fn ok(found: impl Into<String>) -> Self {
        Self {
            id: "",
            state: State::Ok,
            found: found.into(),
            advice: None,
        }
    }

    fn limited(found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            state: State::Limited,
            advice: Some(advice.into()),
            ..Self::ok(found)
        }
    }

    fn missing(found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            state: State::Missing,
            ..Self::limited(found, advice)
        }
    }

    fn named(self, id: &'static str) -> Self {
        Self { id, ..self }
    }
}

/// Everything `lacuna doctor` says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Diagnosis {
    /// Version of the form ([`SCHEMA`]).
    pub schema: u32,
    /// This machine.
    pub host: HostInfo,
    /// What it can do.
    pub checks: Vec<Check>,
}

/// Examines this host; swap files would go to `swap_dir`.
pub fn examine(swap_dir: &Path) -> Diagnosis {
    let host = HostInfo::detect();
    let mut checks = vec![
        checks::cpu(&host).named("cpu"),
        checks::memory().named("memory"),
        checks::cgroup().named("cgroup"),
        checks::swap(swap_dir).named("swap"),
        checks::io_uring().named("io_uring"),
        checks::huge_pages().named("huge_pages"),
        checks::hugetlbfs().named("hugetlbfs"),
        checks::userfaultfd().named("userfaultfd"),
        checks::sandbox().named("sandbox"),
        checks::kvm().named("kvm"),
    ];
    checks.extend(checks::kvm_memory());
    checks.extend(checks::kvm_writes());
    checks.extend([checks::compiler().named("cc"), checks::qemu().named("qemu")]);
    Diagnosis {
        schema: SCHEMA,
        host,
        checks,
    }
}

impl Diagnosis {
    /// For people.
    pub fn to_text(&self) -> String {
        let host = &self.host;
        let mut text = format!("{}, Linux {}\n\n", host.cpu, host.kernel);
        for Check {
            id,
            state,
            found,
            advice,
        } in &self.checks
        {
            let state = match state {
                State::Ok => "ok",
                State::Limited => "limited",
                State::Missing => "missing",
            };
            let _ = writeln!(text, "{id:<12} {state:<8} {found}");
            if let Some(advice) = advice {
                let _ = writeln!(text, "{:21} -> {advice}", "");
            }
        }
        text
    }

    /// For machines.
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On any Linux, every check answers, and a missing feature comes with advice.
    #[test]
    fn every_check_answers_and_what_is_missing_comes_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let diagnosis = examine(dir.path());
        for check in &diagnosis.checks {
            assert!(!check.found.is_empty(), "{check:?}");
            assert_eq!(
                check.state == State::Ok,
                check.advice.is_none(),
                "{check:?}"
            );
        }
        let mut ids: Vec<&str> = diagnosis.checks.iter().map(|check| check.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), diagnosis.checks.len());
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "nothing stays behind"
        );
    }

    #[test]
    fn text_is_aligned_and_json_is_stable() {
        let mut diagnosis = examine(Path::new("/nonexistent"));
        diagnosis.checks = vec![
            Check::ok("24G").named("memory"),
            Check::missing("/dev/kvm is not there", "turn it on").named("kvm"),
        ];
        let text = diagnosis.to_text();
        let expected = "memory       ok       24G\nkvm          missing  /dev/kvm is not there\n\
                        \x20                     -> turn it on\n";
        assert!(text.ends_with(expected), "{text}");
        let json: serde_json::Value = serde_json::from_str(&diagnosis.to_json()).unwrap();
        let kvm = serde_json::json!({"id": "kvm", "state": "missing",
            "found": "/dev/kvm is not there", "advice": "turn it on"});
        assert_eq!(json["checks"][1], kvm);
        assert_eq!(json["schema"], 1);
    }

    #[test]
    fn a_swap_folder_that_is_not_there_is_missing() {
        let check = checks::swap(Path::new("/nonexistent"));
        assert_eq!(check.state, State::Missing);
        assert!(check.found.contains("/nonexistent"));
    }
}
