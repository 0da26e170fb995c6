use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// Asserts that the fused and the composed function panic with this message on every device.
fn refused(message: &str, call: impl Fn(&Device, bool)) {
    for (device, _) in devices() {
        for fused in [true, false] {
            let panic =
                catch_unwind(AssertUnwindSafe(|| call(&device, fused))).expect_err("must fail");
            let text = panic.downcast_ref::<String>().expect("a message");
            assert!(text.contains(message), "{text}");
        }
    }
}

fn call(fused: bool, x: Tensor<4>, table: &RopeTable, at: &Positions, options: RopeOptions) {
    if fused {
        rotate(x, table, at, &options)
    } else {
        composed::rotate(x, table, at, &options)
    };
}

fn input(device: &Device) -> (Tensor<4>, RopeTable) {
    let x = Tensor::zeros([2, 4, 3, 8], device);
    let table = table(&x, 6, 5);
    (x, table)
}

#[test]
fn features_and_heads_that_are_not_there() {
    let with = |options: RopeOptions| {
        move |device: &Device, fused: bool| {
            let (x, table) = input(device);
            call(fused, x, &table, &Positions::From(0), options);
        }
    };
    refused(
        "rope: x [2, 4, 3, 8] has heads of 8 features, and 6 features from feature 3 on are rotated: expected \
                 at least 9 features",
        with(RopeOptions {
            first: 3,
            ..Default::default()
        }),
    );
    refused(
        "rope: x [2, 4, 3, 8] has 3 heads, but 4 heads are to be rotated: expected at most 3",
        with(RopeOptions {
            heads: Some(4),
            ..Default::default()
        }),
    );
}

#[test]
fn positions_that_do_not_fit() {
    let with = |positions: fn(&Device) -> Positions| {
        move |device: &Device, fused: bool| {
            let (x, table) = input(device);
            call(fused, x, &table, &positions(device), RopeOptions::default());
        }
    };
    refused(
        "rope: 4 tokens from position 2 on reach past a table of 5 positions: expected at least 6",
        with(|_| Positions::From(2)),
    );
    refused(
        "reach past a table of 5 positions",
        with(|_| Positions::From(usize::MAX)),
    );
    refused(
        "rope: positions [4, 2] do not fit x [2, 4, 3, 8]: expected [2, 4]",
        with(|device| scattered(4, 2, 5, device)),
    );
}

/// Positions past the rows of long sequences do not continue in the rows of short sequences.
#[test]
fn sequences_longer_than_their_rows() {
    let with = |row: usize| {
        move |device: &Device, fused: bool| {
            let config = RopeConfig {
                scaling: Scaling::LongRope {
                    short_factor: vec![1.0; 3],
                    long_factor: vec![2.0; 3],
                    original: 3,
                    attention_factor: 1.0,
                },
                ..config(6, 5)
            };
            let x = Tensor::zeros([2, 4, 3, 8], device);
            let table = RopeTable::new(&config, device, x.dtype()).unwrap();
            let options = RopeOptions::default();
            call(fused, x, &table, &Positions::From(row), options);
        }
    };
    refused(
        "4 tokens from position 2 on reach past a table of 5 positions",
        with(2),
    );
    refused(
        "4 tokens from position 0 on reach past a table of 3 positions",
        with(5),
    );
}

#[test]
fn tables_that_do_not_fit() {
    refused(
        "rope: x is F32 and the table F64: expected a table made for F32",
        |device, fused| {
            let x = Tensor::zeros([2, 4, 3, 8], device);
            // Not every device supports f64. The type is checked before the device.
            let table = RopeTable::new(&config(6, 5), &Device::flex(), DType::F64).unwrap();
            call(
                fused,
                x,
                &table,
                &Positions::From(0),
                RopeOptions::default(),
            );
        },
    );
}

#[cfg(feature = "wgpu")]
#[test]
#[should_panic(expected = "move it with `RopeTable::to_device`")]
fn a_table_on_another_device() {
    let x = Tensor::<4>::zeros([2, 4, 3, 8], &Device::wgpu(Default::default()));
    let table = RopeTable::new(&config(6, 5), &Device::flex(), DType::F32).unwrap();
    call(true, x, &table, &Positions::From(0), RopeOptions::default());
}

#[test]
fn mla_shapes_that_do_not_agree() {
    let with = |nope: usize, value: usize, shared: usize| {
        move |device: &Device, fused: bool| {
            let q = Tensor::<4>::zeros([2, 4, 3, 10], device);
            let kv = Tensor::<4>::zeros([2, 4, 3, 9], device);
            let k = Tensor::<3>::zeros([2, 4, shared], device);
            let table = table(&q, 6, 5);
            let operation = if fused {
                rotate_mla
            } else {
                composed::rotate_mla
            };
            let positions = Positions::From(0);
            operation(q, kv, k, nope, value, &table, &positions, Pairing::Halves);
        }
    };
    refused(
        "rope: q [2, 4, 3, 10], kv [2, 4, 3, 9] and k_rope [2, 4, 4] do not agree: expected [2, 4, 3, 10], [2, 4, 3, 9] and [2, 4, 6] for \
                 nope = 4, rotary width 6 and value = 5",
        with(4, 5, 4),
    );
    refused("do not agree", with(3, 6, 6));
    refused(
        "rope: invalid nope = 0: expected a positive number",
        with(0, 5, 6),
    );
    refused("rope: invalid value = 0", with(4, 0, 6));
}
