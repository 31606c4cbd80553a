mod common;
use common::{launch, pass};
use lacuna_kvm::*;
use std::time::Duration;
#[test]
fn measure() {
    let f: usize = std::env::var("F").unwrap().parse().unwrap();
    let us: u64 = std::env::var("US").unwrap().parse().unwrap();
        let mut l = launch(128, 128, 1, &format!("seconds=4 faulters={f} workers=1"));
        l.apf = Apf::On; l.first_touch = FirstTouch::Delayed;
        l.latency.set(Duration::from_micros(us));
        let t = std::thread::spawn(|| { std::thread::sleep(Duration::from_millis(3500));
          for e in std::fs::read_dir("/proc/self/task").unwrap() { let p = e.unwrap().path();
            println!("T {} {} {}", std::fs::read_to_string(p.join("comm")).unwrap().trim(), std::fs::read_to_string(p.join("schedstat")).unwrap().trim(),
             std::fs::read_to_string(p.join("status")).unwrap().lines().filter(|l| l.contains("ctxt")).collect::<Vec<_>>().join(" ")); } });
        let (o, text) = pass(&l, "bm");
        t.join().unwrap();
        let mean = o.stats.delay_ns / o.stats.fetched;
        println!("M f={f} {us} {} fetched {} mean {mean}", text.lines().last().unwrap(), o.stats.fetched);
}
