//! Prints the skipped tests and their reasons. Cargo runs test programs in the order of their
//! packages' names, so this one is the last. It has no harness, which would keep its output.

fn main() {
    // Tools ask a test program for the list of its tests (`--list`). There are none.
    if !std::env::args().any(|argument| argument == "--list") {
        lacuna_skip::report();
    }
}
