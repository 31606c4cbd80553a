//! Touches fresh pages in a guest for a while: something to hold a profiler to.
//! `cargo run --release -p lacuna-lab --example touch [vcpus] [pages] [rounds]`
use lacuna_lab::base::Playground;

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|word| word.parse::<u64>().expect("a number"));
    let mut next = |default| arguments.next().unwrap_or(default);
    let (vcpus, pages, rounds) = (next(1), next(32768), next(40));
    let mut place = Playground::new(vcpus as usize, pages).expect("frames");
    for _ in 0..rounds {
        let touch = place.touch(|| ()).expect("a guest");
        let per_page = touch.cpu_ns as f64 / (touch.pages * vcpus) as f64;
        println!(
            "{per_page:.0} ns a page, {:.1} us wall",
            touch.wall_ns as f64 / 1e3
        );
    }
}
