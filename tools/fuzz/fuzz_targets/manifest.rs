#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| burn_megatron_tests::fuzz::run("manifest", data));
