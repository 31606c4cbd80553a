//! Records a skip if the host's processor is not an x86-64: then there is no processor for the
//! comparisons in `native.rs` and `native_faults.rs`.

#[cfg(not(target_arch = "x86_64"))]
#[test]
fn results_are_those_of_the_host_processor() {
    lacuna_skip::skip("the host's processor is no x86-64: nothing to compare with");
}
