//! `lacuna pager top`: a running pager and its VMs, period by period, from its metrics.

use crate::args::TopArgs;
use crate::counters::{Counters, Labels};
use crate::exit::Exit;
use crate::monitor::Printer;
use crate::output::{complain, visible};
use crate::run::{Refusal, exit_of};
use crate::size::Size;
use lacuna_lab::report::{short, time};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// How long the pager may take for an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// More text than [`super::VMS_MAX`] VMs with all of their threads have.
const TEXT_MAX: u64 = 64 << 20;

/// Shows the pager at the address of `args`.
pub fn top(args: &TopArgs) -> Exit {
    exit_of(show(args))
}

fn show(args: &TopArgs) -> Result<Exit, Refusal> {
    let mut printer = Printer::of(args.pacing.json.as_ref())?;
    let read = || -> io::Result<_> { Ok((Instant::now(), Counters::of_text(&ask(args.at)?))) };
    let failed = |error| {
        let at = args.at;
        let text = format!("{at}: {error}; give the address of lacuna pager --metrics");
        (Exit::Host, text)
    };
    let mut before = read().map_err(failed)?;
    if !before.1.has("lacuna_pager_vms") {
        return Err(failed(io::Error::other("no pager answers there")));
    }
    let mut left = args.pacing.count.map(u64::from);
    while left != Some(0) {
        thread::sleep(args.pacing.every);
        let Ok(now) = read() else {
            complain("the pager does not answer any more: its own output says why it ended");
            break;
        };
        let seconds = now.0.duration_since(before.0).as_secs_f64();
        let view = View::between(&before.1, &now.1, seconds);
        let begin = match io::stdout().is_terminal() {
            true => "\x1b[H\x1b[J",
            false => "",
        };
        if printer
            .print(&format!("{begin}{}", view.text()), &view)?
            .is_break()
        {
            break;
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(Exit::Done)
}

/// The metrics at `at`.
fn ask(at: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&at, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: pager\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(TEXT_MAX).read_to_string(&mut answer)?;
    let body = answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned());
    body.ok_or_else(|| io::Error::other("its answer is no HTTP"))
}

/// A pager in one period. Rates are a second; times are nanoseconds.
#[derive(Serialize)]
struct View {
    seconds: f64,
    vms: u64,
    accepted: u64,
    refused: u64,
    faults: f64,
    lost: u64,
    images: Vec<ImageView>,
    served: Vec<VmView>,
}

/// One image, for all of its VMs.
#[derive(Serialize)]
struct ImageView {
    socket: String,
    provided: f64,
    in_flight: u64,
    times: Times,
}

/// One VM.
#[derive(Serialize)]
struct VmView {
    vm: String,
    pid: String,
    bytes: u64,
    /// Units by state.
    units: BTreeMap<&'static str, u64>,
    faults: f64,
    placed: f64,
    zeros: f64,
    late: f64,
    in_flight: u64,
    times: Times,
    /// The share of the period that each thread has waited for pages.
    stalls: BTreeMap<String, f64>,
}

/// How long pages take.
#[derive(Serialize)]
struct Times {
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
}

impl Times {
    fn of(now: &Counters, name: &str, labels: &[(&str, &str)]) -> Self {
        let [p50_ns, p99_ns, p999_ns] = ["0.5", "0.99", "0.999"].map(|quantile| {
            let labels = [labels, &[("quantile", quantile)]].concat();
            (now.get(name, &labels) * 1e9) as u64
        });
        Self {
            p50_ns,
            p99_ns,
            p999_ns,
        }
    }

    fn text(&self) -> String {
        let [p50, p99, p999] = [self.p50_ns, self.p99_ns, self.p999_ns].map(time);
        format!("p50 {p50}, p99 {p99}, p99.9 {p999}")
    }
}

impl View {
    fn between(before: &Counters, now: &Counters, seconds: f64) -> Self {
        let rate = |name: &str, labels: &[(&str, &str)]| {
            ((now.get(name, labels) - before.get(name, labels)) / seconds).max(0.0)
        };
        let image = |labels: &Labels| {
            let of = [("image", &*labels["image"])];
            ImageView {
                socket: labels["image"].clone(),
                provided: rate("lacuna_source_fetch_seconds_count", &of),
                in_flight: now.get("lacuna_source_in_flight", &of) as u64,
                times: Times::of(now, "lacuna_source_fetch_seconds", &of),
            }
        };
        let vm = |labels: &Labels| {
            let of = [("vm", &*labels["vm"])];
            let state = |state| {
                let of = [of[0], ("state", state)];
                (state, now.get("lacuna_pager_vm_units", &of) as u64)
            };
            let stalls = "lacuna_pager_vm_stall_seconds_total";
            let threads = now
                .each(stalls, "thread")
                .filter(|of| of["vm"] == labels["vm"]);
            let stall = |labels: &Labels| {
                let thread = &labels["thread"];
                (thread.clone(), rate(stalls, &[of[0], ("thread", thread)]))
            };
            VmView {
                vm: labels["vm"].clone(),
                pid: labels.get("pid").cloned().unwrap_or_default(),
                bytes: now.get("lacuna_pager_vm_bytes", &of) as u64,
                units: ["missing", "waiting", "settled", "lost"].map(state).into(),
                faults: rate("lacuna_pager_vm_faults_total", &of),
                placed: rate("lacuna_pager_vm_placed_total", &of),
                zeros: rate("lacuna_pager_vm_zeros_total", &of),
                late: rate("lacuna_pager_vm_late_total", &of),
                in_flight: now.get("lacuna_pager_vm_in_flight", &of) as u64,
                times: Times::of(now, "lacuna_pager_vm_fetch_seconds", &of),
                stalls: threads.map(stall).collect(),
            }
        };
        Self {
            seconds,
            vms: now.get("lacuna_pager_vms", &[]) as u64,
            accepted: now.get("lacuna_pager_accepted_total", &[]) as u64,
            refused: now.get("lacuna_pager_refused_total", &[]) as u64,
            faults: rate("lacuna_pager_faults_total", &[]),
            lost: now.get("lacuna_pager_lost_total", &[]) as u64,
            images: now
                .each("lacuna_source_in_flight", "image")
                .map(image)
                .collect(),
            served: now.each("lacuna_pager_vm_bytes", "vm").map(vm).collect(),
        }
    }

    /// A line for the pager, for each image, and for each VM.
    fn text(&self) -> String {
        let mut text = format!(
            "pager     {} VMs, {} so far, {} refused; {} faults/s, {} units lost\n",
            self.vms,
            self.accepted,
            self.refused,
            short(self.faults),
            self.lost
        );
        // A write to a String does not fail.
        for image in &self.images {
            let (socket, rate) = (visible(&image.socket), short(image.provided));
            let (in_flight, times) = (image.in_flight, image.times.text());
            let _ = writeln!(
                text,
                "image     {socket}: {rate} pages/s, {in_flight} in flight, {times}"
            );
        }
        for vm in &self.served {
            let pid = visible(&vm.pid);
            let units = vm.units.iter().filter(|(_, count)| **count > 0);
            let units: Vec<_> = units
                .map(|(state, count)| format!("{count} {state}"))
                .collect();
            let [faults, placed, zeros] = [vm.faults, vm.placed, vm.zeros].map(short);
            let _ = writeln!(
                text,
                "vm {:<6} pid {pid:<8} {:>6}: {faults} faults/s, {placed} placed/s, {zeros} \
                 zeros/s, {} in flight; {}; units: {}",
                visible(&vm.vm),
                Size(vm.bytes).to_string(),
                vm.in_flight,
                vm.times.text(),
                units.join(", "),
            );
            let most = vm.stalls.iter().max_by(|a, b| a.1.total_cmp(b.1));
            if let Some((thread, share)) = most {
                let (thread, percent) = (visible(thread), share * 100.0);
                let threads = vm.stalls.len();
                let _ = writeln!(
                    text,
                    "          of {threads} threads, {thread} waits most: {percent:.1} % of time"
                );
            }
        }
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_of_two_readings() {
        let text = |faults: u64, stall: f64| {
            format!(
                "# HELP lacuna_pager_vms VMs\nlacuna_pager_vms 1\nlacuna_pager_accepted_total 2\n\
                 lacuna_pager_faults_total {faults}\nnonsense\n\
                 lacuna_source_in_flight{{image=\"/run/a, b\"}} 3\n\
                 lacuna_source_fetch_seconds{{image=\"/run/a, b\",quantile=\"0.999\"}} 0.002\n\
                 lacuna_source_fetch_seconds_count{{image=\"/run/a, b\"}} {faults}\n\
                 lacuna_pager_vm_bytes{{vm=\"1\",pid=\"77\"}} 1048576\n\
                 lacuna_pager_vm_faults_total{{vm=\"1\",pid=\"77\"}} {faults}\n\
                 lacuna_pager_vm_units{{vm=\"1\",pid=\"77\",state=\"missing\"}} 200\n\
                 lacuna_pager_vm_units{{vm=\"1\",pid=\"77\",state=\"settled\"}} 56\n\
                 lacuna_pager_vm_stall_seconds_total{{vm=\"1\",pid=\"77\",thread=\"78\"}} {stall}\n\
                 lacuna_pager_vm_stall_seconds_total{{vm=\"1\",pid=\"77\",thread=\"79\"}} 0\n"
            )
        };
        let [before, now] = [text(10, 0.5), text(30, 1.0)].map(|text| Counters::of_text(&text));
        let view = View::between(&before, &now, 2.0);
        assert_eq!(
            view.text(),
            "pager     1 VMs, 2 so far, 0 refused; 10 faults/s, 0 units lost\n\
             image     /run/a, b: 10 pages/s, 3 in flight, p50 0 ns, p99 0 ns, p99.9 2.0 ms\n\
             vm 1      pid 77           1M: 10 faults/s, 0 placed/s, 0 zeros/s, 0 in flight; \
             p50 0 ns, p99 0 ns, p99.9 0 ns; units: 200 missing, 56 settled\n          \
             of 2 threads, 78 waits most: 25.0 % of time\n\n"
        );
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(json["images"][0]["times"]["p999_ns"], 2_000_000, "{json}");
        assert_eq!(json["served"][0]["stalls"]["78"], 0.25, "{json}");
    }
}
