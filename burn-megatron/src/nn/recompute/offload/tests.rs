//! Tests the locations of saved inputs, their transfers, and failures.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};

use super::*;
use crate::comm::World;
use crate::host_link::OffloadEventKind::{InputDown, InputUp};
use crate::host_link::{OffloadEventKind, OffloadRecord, SimulatedHostLink};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const BYTES: u64 = 512;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn store(bytes: u64, prefetch: usize) -> ActivationStore {
    ActivationStore::start(ActivationOffload { bytes, prefetch }).unwrap()
}

/// Returns an input of 512 bytes with this value in every element.
fn input(value: usize) -> Tensor<1> {
    Tensor::ones([128], &Device::flex()).mul_scalar(value as f32)
}

fn save(store: &ActivationStore, values: std::ops::Range<usize>) -> Vec<(u64, usize)> {
    store.begin_forward();
    values
        .map(|value| (store.save(input(value)), value))
        .collect()
}

/// Takes inputs, starting with the last, and checks their values.
fn take(store: &ActivationStore, saved: Vec<(u64, usize)>) {
    for (number, value) in saved.into_iter().rev() {
        let found: Vec<f32> = store.take(number).into_data().try_into_vec().unwrap();
        assert_eq!(found, vec![value as f32; 128]);
    }
}

/// Runs a forward pass and a backward pass of four blocks of 15 and 30 ms. The link copies an input in 10 ms.
fn recorded(prefetch: usize) -> (OffloadRecord, ActivationUsage) {
    let store = store(1 << 20, prefetch);
    let link = SimulatedHostLink::new(ms(2), 64_000.0).unwrap();
    store.simulate(link, ms(15), ms(30));
    take(&store, save(&store, 0..4));
    (store.take_record(), store.usage())
}

fn times(record: &OffloadRecord, kind: OffloadEventKind) -> Vec<(usize, u128)> {
    let events = record.events.iter().filter(|event| event.kind == kind);
    events
        .map(|event| (event.number, event.start.as_millis()))
        .collect()
}

#[test]
fn inputs_leave_behind_the_forward_and_return_ahead_of_the_backward() {
    let (record, used) = recorded(1);
    assert_eq!(times(&record, InputUp), [(0, 30), (1, 45), (2, 60)]);
    assert_eq!(times(&record, InputDown), [(2, 70), (1, 90), (0, 120)]);
    assert_eq!((record.blocked, record.hidden_share()), (ms(0), 1.0));
    let traffic = HostTraffic {
        up: 3 * BYTES,
        down: 3 * BYTES,
    };
    assert_eq!(used.traffic, traffic);
    assert_eq!(used.host_peak, 3 * BYTES);
    // The device holds the last input, the input before it, and an input that is being copied.
    assert!((2 * BYTES..=3 * BYTES).contains(&used.device_peak));
    assert_eq!((used.device, used.host), (0, 0));
}

#[test]
fn without_prefetch_the_backward_waits() {
    let (record, used) = recorded(0);
    let up = [(0, 15), (1, 30), (2, 45), (3, 60)];
    assert_eq!(times(&record, InputUp), up);
    let down = [(3, 70), (2, 110), (1, 150), (0, 190)];
    assert_eq!(times(&record, InputDown), down);
    assert_eq!(record.blocked, ms(20 + 3 * 10));
    assert_eq!(record.hidden_share(), 1.0 - 0.05 / 0.08);
    assert_eq!(used.host_peak, 4 * BYTES);
}

#[test]
fn a_budget_keeps_the_others_on_the_device() {
    for (bytes, host) in [(0, 0), (BYTES - 1, 0), (2 * BYTES + 1, 2), (9 * BYTES, 5)] {
        let store = store(bytes, 1);
        take(&store, save(&store, 0..6));
        let used = store.usage();
        assert_eq!(used.host_peak, host * BYTES, "{bytes}");
        assert_eq!((used.device, used.host), (0, 0), "{bytes}");
    }
}

/// Forward passes run ahead of backward passes, as in a pipeline.
#[test]
fn each_forward_is_a_chain_of_its_own() {
    let store = store(1 << 20, 1);
    let link = SimulatedHostLink::new(ms(2), 64_000.0).unwrap();
    store.simulate(link, ms(15), ms(30));
    let first = save(&store, 0..3);
    let second = save(&store, 3..6);
    take(&store, first);
    let third = save(&store, 6..9);
    take(&store, second);
    take(&store, third);
    let record = store.take_record();
    let order = |kind| -> Vec<_> {
        let times = times(&record, kind).into_iter();
        times.map(|(number, _)| number).collect()
    };
    assert_eq!(order(InputUp), [0, 1, 3, 4, 6, 7]);
    assert_eq!(order(InputDown), [1, 0, 4, 3, 7, 6]);
    assert_eq!(store.usage().host_peak, 4 * BYTES);
}

#[test]
fn inputs_without_a_backward_are_dropped() {
    let store = Arc::new(store(1 << 20, 1));
    let inputs: Vec<_> = (0..4).map(|_| SavedInput::<1>::new(&store)).collect();
    for (value, saved) in inputs.iter().enumerate() {
        saved.save(input(value).into_dispatch());
    }
    drop(inputs);
    let began = Instant::now();
    while (store.usage().device, store.usage().host) != (0, 0) {
        assert!(began.elapsed() < ms(20_000), "{:?}", store.usage());
        std::thread::sleep(ms(1));
    }
}

/// Returns the error of a save that waits up to 100 ms for a copy that never ends.
fn error(before: impl Fn(&ActivationStore) + Sync) -> String {
    let config = ActivationOffload {
        bytes: 1 << 20,
        prefetch: 0,
    };
    let run = |_| {
        let store = ActivationStore::with_deadline(config, ms(100))?;
        store.stall();
        before(&store);
        store.save(input(0));
        Ok::<_, AnyError>(())
    };
    let run = World::threads(1).unwrap().run(run);
    run.unwrap_err().to_string()
}

#[test]
fn a_wait_has_a_deadline_and_names_a_failure() {
    let late = error(|_| ());
    let expected =
        "activation offload: the input 0 of a recomputed block: no copy has ended after 0.1 s";
    assert!(late.contains(expected), "{late}");
    let failed = error(|store| store.fail("a planted fault"));
    assert!(
        failed.contains("of a recomputed block: a planted fault"),
        "{failed}"
    );
}
