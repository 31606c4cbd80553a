//! Touches fresh pages in guests for a while, to be profiled.
//! `cargo run --release -p lacuna-lab --example touch [vcpus] [pages] [rounds] [vms]`
use lacuna_lab::base::{Fixture, touch_together};

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|word| word.parse::<u64>().expect("a number"));
    let mut next = |default| arguments.next().unwrap_or(default);
    let (vcpus, pages, rounds, vms) = (next(1), next(32768), next(40), next(1));
    let mut fixtures: Vec<_> = (0..vms)
        .map(|_| Fixture::new(vcpus as usize, pages).expect("frames"))
        .collect();
    for _ in 0..rounds {
        let touch = touch_together(&mut fixtures, || ()).expect("a guest");
        let per_page = touch.cpu_ns as f64 / (touch.pages * vcpus * vms) as f64;
        println!(
            "{per_page:.0} ns a page, {:.1} us wall",
            touch.wall_ns as f64 / 1e3
        );
    }
}
