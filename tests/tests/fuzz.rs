//! Tests each fuzz target on some thousand mutated inputs. A target must not panic, and its allocations must be
//! proportional to the length of the input. cargo-fuzz runs the same targets for longer: see `tools/fuzz/`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use burn_megatron_tests::fuzz::{Mutations, TARGETS, Target};

/// An allocator that records the largest allocation of each thread.
struct Largest;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(size: usize) {
    // A thread may allocate while it exits.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// Safety: all calls are forwarded to the system allocator.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

/// The number of bytes that a small input may allocate.
const FEW: usize = 64 << 20;

/// The number of bytes that an input may allocate per byte.
const PER_BYTE: usize = 512;

/// The time limit of a small input.
const LONG: Duration = Duration::from_secs(20);

/// The number of inputs per target.
const INPUTS: usize = 20_000;

fn target(name: &str) -> &'static Target {
    let found = TARGETS.iter().find(|target| target.name == name);
    found.expect("there is such a target")
}

/// Runs an input. Returns a description of its fault, or `None`.
fn fault(target: &Target, input: &[u8]) -> Option<String> {
    LARGEST.set(0);
    let started = Instant::now();
    let run = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let largest = LARGEST.get();
    match run {
        Err(_) => Some("panics".into()),
        Ok(_) if largest > FEW + PER_BYTE * input.len() => {
            Some(format!("allocates {largest} bytes at once"))
        }
        Ok(_) if started.elapsed() > LONG => Some(format!("takes {:?}", started.elapsed())),
        Ok(_) => None,
    }
}

fn fuzz(name: &str) {
    let target = target(name);
    let seeds = (target.seeds)();
    for seed in &seeds {
        assert!((target.run)(seed), "{name} does not accept its seed");
    }
    let mut accepted = 0;
    for input in Mutations::new(seeds, 1).take(INPUTS) {
        if let Some(fault) = fault(target, &input) {
            let input = String::from_utf8_lossy(&input).escape_debug().to_string();
            panic!("{name} {fault} for {} bytes: {input}", input.len());
        }
        accepted += usize::from((target.run)(&input));
    }
    // Mutations that are all rejected at the first byte would test nothing.
    assert!(
        accepted > 0 && accepted < INPUTS,
        "{name}: {accepted} accepted"
    );
}

macro_rules! fuzzed {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { fuzz(stringify!($name)); })*

        #[test]
        fn every_target_has_a_test_and_a_file_for_cargo_fuzz() {
            let tests = [$(stringify!($name)),*];
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, tests);
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/fuzz/fuzz_targets");
            for name in names {
                let path = format!("{folder}/{name}.rs");
                let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
                assert!(text.contains(&format!("run(\"{name}\", data)")), "{path}");
            }
        }
    };
}

fuzzed!(
    hf_config,
    hf_index,
    layout,
    manifest,
    recipe,
    rendezvous,
    safetensors_header,
    schedule_csv,
    sidecar,
    token_index,
);

#[test]
fn a_fault_is_found() {
    let lying = Target {
        name: "lying",
        seeds: || vec![b"8".to_vec()],
        run: |input| Vec::<u8>::with_capacity(1 << (input[0] % 32)).capacity() > 0,
    };
    let found = |input: &[u8]| fault(&lying, input);
    assert_eq!(found(&[3]), None);
    assert_eq!(
        found(&[30]).as_deref(),
        Some("allocates 1073741824 bytes at once")
    );
    assert_eq!(found(&[]).as_deref(), Some("panics"));
}
