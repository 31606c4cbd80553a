//! Frames on a terminal in memory, and a guest that answers by hand.

use super::feed::{Ask, News, Sample, Wanted};
use super::keys::{self, Action};
use super::model::Model;
use super::{draw, pressed};
use crate::counters::Counters;
use lacuna::dirty::Detection;
use lacuna::memory::{PageMap, PageStates};
use lacuna_control::{SetRequest, Setting, Settings, State, Status};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use std::time::{Duration, Instant};

fn free<T>(value: T) -> Setting<T> {
    Setting {
        value: Some(value),
        fixed: None,
    }
}

/// The counters after `seconds` of a run.
fn counters(seconds: f64) -> String {
    let state = |vcpu, state, share: f64| {
        let labels = format!("{{vcpu=\"{vcpu}\",state=\"{state}\"}}");
        format!(
            "lacuna_vcpu_state_seconds_total{labels} {}\n",
            share * seconds
        )
    };
    let mut text = String::new();
    for vcpu in 0..2 {
        text += &state(vcpu, "running", 0.5);
        text += &state(vcpu, "faulting", 0.25);
        text += &state(vcpu, "waiting", 0.15);
        text += &state(vcpu, "halted", 0.1);
        text += &format!("lacuna_apf_in_flight{{vcpu=\"{vcpu}\"}} 3\n");
    }
    let [zero, swap, steps] = [1000.0, 31_000.0, 2e6].map(|rate| rate * seconds);
    text + &format!(
        "lacuna_fault_seconds{{kind=\"swap-in\",quantile=\"0.99\"}} 0.0012\n\
         lacuna_vm_resident_bytes {}\nlacuna_host_faults_zero_fill_total {zero}\n\
         lacuna_host_faults_swap_in_total {swap}\n\
         lacuna_guest_thread_steps_total{{thread=\"0 work-0\",kind=\"work\"}} {steps}\n\
         lacuna_guest_thread_steps_total{{thread=\"1 fault-0\",kind=\"fault\"}} 50\n\
         lacuna_guest_thread_goal{{thread=\"1 fault-0\"}} 100\n",
        32 << 20
    )
}

/// A model of a guest that has run for two seconds.
fn model() -> Model {
    let mut model = Model::default();
    let now = Instant::now();
    for tenth in 0..20 {
        let at = now + Duration::from_millis(100 * tenth);
        let status = Status {
            state: State::Running,
            backend: "soft".into(),
            arch: "x86_64".into(),
            vcpus: 2,
            memory_bytes: 64 << 20,
            seconds: tenth as f64 / 10.0,
            ..Status::default()
        };
        let counters = Counters::of_text(&counters(tenth as f64 / 10.0));
        let sample = Sample {
            at,
            status,
            counters,
        };
        assert_eq!(model.take(News::Sample(Box::new(sample))), None);
    }
    let settings = Settings {
        async_faults: free(true),
        huge_pages: Setting {
            value: Some(false),
            fixed: Some("the VM was started without them".into()),
        },
        detect: free(Detection::Pml),
        resident_bytes: free(32 << 20),
        source_delay_us: free(0),
    };
    model.take(News::Settings(Box::new(settings)));
    let cell = |index: u64| PageStates {
        resident: if index < 512 { 16 } else { 0 },
        swapped: if index < 512 { 0 } else { 16 },
        ..PageStates::default()
    };
    model.take(News::Map(PageMap {
        pages_per_cell: 16,
        cells: (0..1024).map(cell).collect(),
    }));
    model.lines = (0..9)
        .map(|line| format!("line {line} of the guest"))
        .collect();
    model
}

/// The lines of a frame.
fn frame(model: &Model, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let frame = terminal.draw(|frame| draw(frame, model)).unwrap();
    let cells = frame.buffer.content.chunks(usize::from(width));
    let lines = cells.map(|row| row.iter().map(|cell| cell.symbol()).collect());
    lines
        .map(|line: String| line.trim_end().to_owned())
        .collect()
}

/// The first line with `text`.
fn find<'a>(lines: &'a [String], text: &str) -> &'a str {
    let found = lines.iter().find(|line| line.contains(text));
    found.unwrap_or_else(|| panic!("no {text}:\n{}", lines.join("\n")))
}

#[test]
fn every_width_shows_every_part() {
    for (width, height) in [(60, 26), (110, 30), (200, 50)] {
        let mut model = model();
        model.take(News::Done('A', "async faults on".into()));
        let lines = frame(&model, width, height);
        if std::env::var_os("LACUNA_SHOW_FRAMES").is_some() {
            println!("{width} x {height}\n{}", lines.join("\n"));
        }
        assert!(find(&lines, "running 1.9 s").starts_with("lacuna"));
        let vcpu = find(&lines, "vcpu 1");
        assert!(vcpu.contains("█▒"), "{vcpu}");
        assert!(vcpu.contains(" 50  25  15  10 %"), "{vcpu}");
        // Half of the memory is in swap: the bar's halves are equal.
        let column = if width < 100 { width } else { width / 2 - 1 };
        let bar = find(&lines, "█s").chars().take(column.into());
        let bar: String = bar.collect();
        let [resident, swapped] = ['█', 's'].map(|glyph| bar.matches(glyph).count());
        assert!(resident.abs_diff(swapped) <= 1, "{bar}");
        find(&lines, "resident 32M of budget 32M (guest 64M)");
        assert!(find(&lines, "swap-in").contains("31.0k/s"));
        find(&lines, "swap-in p99       1.2 ms");
        find(&lines, "tokens                 6");
        // The switch is marked below the newest values.
        assert!(find(&lines, "60 s ago").contains('A'));
        find(&lines, "memory map");
        let thread = find(&lines, "1 fault-0");
        assert!(
            thread.contains("█░") && thread.contains(" 50 %"),
            "{thread}"
        );
        assert!(find(&lines, "0 work-0").contains("2.0M/s"));
        find(&lines, "line 8 of the guest");
        find(&lines, "[a] async faults on");
        // A fixed setting has no key.
        assert!(!lines.iter().any(|line| line.contains("[h]")));
        assert!(find(&lines, "[q]uit").chars().count() <= width.into());
        model.shows_help = true;
        let help = frame(&model, width, height);
        find(&help, "async faults on or off");
        assert!(keys::HELP.iter().all(|line| line.chars().count() <= 60));
        assert!(!help.iter().any(|line| line.contains("vcpu 1")));
    }
}

#[test]
fn a_small_terminal_shows_what_fits() {
    for (width, height) in [(1, 1), (20, 5), (59, 12), (99, 10)] {
        let lines = frame(&model(), width, height);
        assert_eq!(lines.len(), usize::from(height));
    }
}

#[test]
fn a_migration_is_shown_on_both_sides() {
    let mut model = model();
    let status = serde_json::json!({
        "protocol": 1, "state": "arriving", "backend": "soft", "arch": "x86_64", "vcpus": 2,
        "memory_bytes": 64 << 20, "seconds": 0.0,
        "arriving": {
            "at": "unix:/s", "mode": "hybrid", "stage": "rest", "came": 512, "late": 9,
            "again": 0, "downtime_us": 0, "seconds": 1.5, "missing": 7, "ranges": [],
            "bytes": 4096, "rate": 1048576.0, "cuts": 0, "cut": null,
        },
    });
    model.other = Some(serde_json::from_value(status).unwrap());
    let lines = frame(&model, 110, 24);
    find(&lines, "in progress");
    find(&lines, "other side: arrives at unix:/s");
    find(&lines, "7 pages missing");
}

#[test]
fn a_key_sends_its_request() {
    let model = model();
    let set = |key| match keys::action(key, &model) {
        Some(Action::Ask(Ask {
            wanted: Wanted::Set(request),
            mark,
            ..
        })) => (request, mark),
        other => panic!("{other:?}"),
    };
    let none = SetRequest::default;
    for (key, request, mark) in [
        (
            'a',
            SetRequest {
                async_faults: Some(false),
                ..none()
            },
            'a',
        ),
        (
            'd',
            SetRequest {
                detect: Some(Detection::WriteProtect),
                ..none()
            },
            'd',
        ),
        (
            '+',
            SetRequest {
                resident_bytes: Some(40 << 20),
                ..none()
            },
            '+',
        ),
        (
            '-',
            SetRequest {
                resident_bytes: Some(24 << 20),
                ..none()
            },
            '-',
        ),
        (
            's',
            SetRequest {
                source_delay_us: Some(100),
                ..none()
            },
            's',
        ),
    ] {
        assert_eq!(set(key), (request, mark));
    }
    let Some(Action::Refuse(why)) = keys::action('h', &model) else {
        panic!("the setting is fixed");
    };
    assert_eq!(why, "huge pages: the VM was started without them");
    let Some(Action::Ask(ask)) = keys::action('p', &model) else {
        panic!("the guest can be paused");
    };
    assert_eq!(ask.wanted, Wanted::Pause);
    assert_eq!(keys::action('x', &model), None);
    let press = |key, modifiers| pressed(&Event::Key(KeyEvent::new(KeyCode::Char(key), modifiers)));
    assert_eq!(press('c', KeyModifiers::CONTROL), Some('q'));
    assert_eq!(press('c', KeyModifiers::ALT), None);
    assert_eq!(press('+', KeyModifiers::SHIFT), Some('+'));
}

#[test]
fn a_refusal_and_a_lost_connection_are_shown() {
    let mut model = model();
    model.take(News::Refused("resident_bytes: too small".into()));
    find(&frame(&model, 60, 24), "resident_bytes: too small");
    let why = model.take(News::Gone("the VM has ended".into()));
    assert_eq!(why.as_deref(), Some("the VM has ended"));
}
