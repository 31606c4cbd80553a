//! Whether a run keeps its budget: the memory of the whole process against it.

use crate::experiment::{LabError, LabResult, Options};
use crate::options::{ARCHS, name_of};
use crate::result::{Better, Measurement, Report};
use crate::stats::Summary;
use serde_json::Value;
use std::process::{Command, Stdio};

const MEMORY: &str = "2G";
const RESIDENT: &str = "512M";

/// `run.memory_overhead_percent`. It is measured in a process of its own, because another
/// experiment in the same process could have a higher peak.
pub fn overhead(options: &Options, report: &mut Report) -> LabResult {
    let runs = if options.quick { 1 } else { 6 };
    let samples = (0..runs)
        .map(|seed| one(options, seed))
        .collect::<Result<Vec<f64>, _>>()?;
    let id = "run.memory_overhead_percent";
    let result = Measurement::new(id, "%", Better::Lower, Summary::of(&samples));
    let result = result
        .bar(10.0)
        .param("memory", MEMORY)
        .param("image", "bm");
    report.push(result.param("resident", RESIDENT));
    Ok(())
}

fn one(options: &Options, seed: u32) -> LabResult<f64> {
    let swap = format!("file,dir={}", options.swap_dir.display());
    // `bm` reads and writes at random over all of its memory. The budget is full within a second,
    // and pages are swapped in and out for the rest of the time.
    let seconds = if options.quick { 3 } else { 10 };
    let arch = name_of(&ARCHS, &options.arch);
    let append = format!("seed={seed} seconds={seconds}");
    let output = Command::new(&options.lacuna)
        .args(["run", "bm", "--memory", MEMORY, "--resident", RESIDENT])
        .args(["--vcpus", "2", "--arch", arch, "--swap", &swap])
        .args(["--append", &append, "--json", "-", "--quiet"])
        .stdin(Stdio::null())
        .output()
        .map_err(LabError::io(options.lacuna.display().to_string()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let text = format!("`lacuna run bm` failed: {}", text.trim());
        return Err(LabError::Guest(text));
    }
    let unreadable = |why: &str| LabError::Guest(format!("`lacuna run --json -`: {why}"));
    let json: Value =
        serde_json::from_slice(&output.stdout).map_err(|e| unreadable(&e.to_string()))?;
    let bytes = |name: &str| {
        json["last"][name]
            .as_f64()
            .ok_or_else(|| unreadable(&format!("no last.{name}")))
    };
    let (peak, budget) = (bytes("peak_bytes")?, bytes("budget_bytes")?);
    Ok(100.0 * (peak - budget) / budget)
}
