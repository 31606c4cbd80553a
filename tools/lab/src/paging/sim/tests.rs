use super::*;

const PAGES: u64 = 20_000;

const COSTS: Costs = Costs {
    varies: Tenths::always(1.0),
    fault: 1000.0,
    enqueue: 100.0,
    read: 300.0,
    read_each: 50.0,
    copy: 2000.0,
    scan: 150.0,
    scan_each: 7.0,
    wake: 400.0,
    wake_idle: 600.0,
    idle: Idle([(0.0, Tenths::always(20_000.0)); GAPS]),
    switch: 900.0,
    line: 0.0,
};

const fn setting(threads: usize, readers: usize, cores: usize) -> Setting {
    Setting {
        threads,
        readers,
        cores,
        batch: 1,
    }
}

#[track_caller]
fn near(found: f64, wanted: f64, percent: f64) {
    let error = 100.0 * (found / wanted - 1.0).abs();
    assert!(error < percent, "{found} is not {wanted}: {error} %");
}

#[test]
fn a_core_sleeps_the_deeper_the_longer_it_is_idle() {
    let idle = Idle(
        [
            (10.0, 1.0),
            (20.0, 3.0),
            (40.0, 3.0),
            (80.0, 5.0),
            (160.0, 9.0),
        ]
        .map(|(gap, takes)| (gap, Tenths::always(takes))),
    );
    for (gap, wanted) in [
        (0.0, 1.0),
        (10.0, 1.0),
        (15.0, 2.0),
        (60.0, 4.0),
        (999.0, 9.0),
    ] {
        near(idle.after(gap, 3), wanted, 0.001);
    }
}

/// The mean wait in M/D/1 is `load / (2 (1 - load))` services.
#[test]
fn a_server_with_random_arrivals_is_an_m_d_1_queue() {
    for load in [0.3, 0.6, 0.8] {
        let (mut server, mut state) = (Server::default(), 0x9e37_79b9_7f4a_7c15_u64);
        let (service, customers) = (1_000_000, 400_000);
        let (mut now, mut waited) = (0.0, 0.0);
        for _ in 0..customers {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let uniform = ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
            now += -uniform.ln() * service as f64 / load;
            let end = server.serve(now as Ps, service);
            waited += (end - service - now as Ps) as f64;
        }
        let mean = waited / f64::from(customers) / service as f64;
        near(mean, load / (2.0 * (1.0 - load)), 3.0);
    }
}

/// One thread and one reader: a cycle is the sum of its steps, with two wake-ups of a core.
#[test]
fn one_thread_takes_the_sum_of_all_steps() {
    let c = Costs {
        line: 10.0,
        ..COSTS
    };
    let wake = c.wake + c.wake_idle + c.idle.after(0.0, 0) + 2.0 * c.line;
    let queue_changes = c.enqueue + c.read_each + 4.0 * c.line;
    let scan = c.scan + c.scan_each + 2.0 * c.line;
    let cycle = c.fault + c.read + queue_changes + c.copy + scan + 2.0 * wake;
    near(queue(&c, &setting(1, 1, 1), PAGES), 1e9 / cycle, 0.1);
}

/// One reader that never sleeps serves a page in the sum of its own steps.
#[test]
fn one_reader_that_is_saturated_sets_the_rate() {
    let c = Costs {
        scan_each: 0.0,
        enqueue: 0.0,
        wake_idle: 0.0,
        ..COSTS
    };
    let service = c.read + c.read_each + c.copy + c.scan + c.wake;
    near(queue(&c, &setting(64, 1, 128), PAGES), 1e9 / service, 0.5);
}

/// The scan passes every sleeping thread: nearly all threads, if there are many.
#[test]
fn the_rate_falls_with_the_length_of_the_queue() {
    let c = Costs {
        enqueue: 0.0,
        wake_idle: 0.0,
        idle: Idle([(0.0, Tenths::always(0.0)); GAPS]),
        fault: 0.0,
        line: 100.0,
        ..COSTS
    };
    for threads in [64, 128, 256] {
        let each = (c.scan_each + c.line) * threads as f64;
        let lines = 5.0 * c.line;
        let service = c.read + c.read_each + c.copy + c.scan + c.wake + each + lines;
        let rate = queue(&c, &setting(threads, 1, 512), PAGES);
        near(rate, 1e9 / service, 5.0);
    }
}

/// Threads on one core take turns: each page costs a fault, the queue and a switch.
#[test]
fn threads_that_share_a_core_take_turns() {
    let c = Costs {
        fault: 10_000.0,
        scan_each: 0.0,
        wake: 0.0,
        wake_idle: 0.0,
        ..COSTS
    };
    let work = c.fault + c.enqueue + c.switch;
    near(queue(&c, &setting(16, 4, 1), PAGES), 1e9 / work, 2.0);
}

/// A batch shares the reader's calls.
#[test]
fn a_batch_is_read_by_one_call() {
    let c = Costs {
        read: 50_000.0,
        ..COSTS
    };
    let batches = Setting {
        batch: 64,
        ..setting(64, 1, 128)
    };
    let (one, many) = (
        queue(&c, &setting(64, 1, 128), PAGES),
        queue(&c, &batches, PAGES),
    );
    assert!(many > 5.0 * one, "{many} against {one}");
}

/// With a reader for each thread and costless locks, the threads do not delay each other.
#[test]
fn what_shares_nothing_scales() {
    let c = Costs {
        enqueue: 0.0,
        read_each: 0.0,
        scan: 0.0,
        scan_each: 0.0,
        ..COSTS
    };
    let one = queue(&c, &setting(1, 1, 1), PAGES);
    near(queue(&c, &setting(32, 32, 32), PAGES), 32.0 * one, 1.0);
    near(exits(5000.0, 0.0, 32, 32, PAGES), 32.0 * 1e9 / 5000.0, 0.5);
    near(exits(5000.0, 0.0, 32, 2, PAGES), 2.0 * 1e9 / 5000.0, 0.5);
}

/// The line of the address space's lock bounds what all cores together do.
#[test]
fn exits_end_at_the_lock_of_the_address_space() {
    near(exits(5000.0, 100.0, 8, 8, PAGES), 8.0 * 1e9 / 5200.0, 1.0);
    near(exits(5000.0, 100.0, 256, 256, PAGES), 1e9 / 200.0, 0.5);
}

#[test]
fn tenths_are_means_of_the_sorted_samples() {
    let tenths = Tenths::of((0..40).rev().map(f64::from).collect());
    assert_eq!((tenths.0[0], tenths.0[9]), (1.5, 37.5));
    near(tenths.mean(), 19.5, 1e-9);
}

/// Where no thread waits for another, only the mean of a thread's work counts.
#[test]
fn variation_keeps_the_mean() {
    let varies = Tenths(from_fn(|i| 0.1 + 0.2 * i as f64));
    near(varies.mean(), 1.0, 1e-9);
    let varied = Costs { varies, ..COSTS };
    let setting = Setting {
        threads: 1,
        readers: 1,
        cores: 1,
        batch: 1,
    };
    let [without, with] = [COSTS, varied].map(|costs| queue(&costs, &setting, 20_000));
    near(with / without, 1.0, 1.0);
    assert_ne!(with, without, "the times vary");
}
