//! Where the host's processor is no x86-64, there is nothing to compare the software one with. The
//! comparisons themselves are in `native.rs` and `native_faults.rs`.

#[cfg(not(target_arch = "x86_64"))]
#[test]
fn results_are_those_of_the_host_processor() {
    lacuna_skip::skip("the host's processor is no x86-64: nothing to compare with");
}
