//! The engines for matrix units where a device has them, and [`CmmaTiles`] with loops in place of
//! them on every CubeCL device.

use super::*;
use crate::testing::{assert_close, tolerance};

/// As [`CANCELLED`], for gradients of weights that were rounded to 16 bits before their sum.
const ROUNDED: f64 = 2.0 * CANCELLED;

/// An engine to test.
struct Tested {
    device: Device,
    engine: Arc<dyn AttentionEngine>,
    types: Vec<DType>,
}

/// The engines to test; what is left out is printed.
fn engines() -> Vec<Tested> {
    let mut engines = Vec::new();
    for (device, _) in devices() {
        let mut push = |engine: Arc<dyn AttentionEngine>, types: &[DType]| {
            engines.push(Tested {
                device: device.clone(),
                engine,
                types: types.to_vec(),
            });
        };
        match CmmaTiles::new(&device) {
            Ok(engine) => push(Arc::new(engine.clone()), engine.types()),
            Err(error) => println!("left out: {error}"),
        }
        match MmaTiles::new(&device) {
            Ok(engine) => push(Arc::new(engine.clone()), engine.types()),
            Err(error) => println!("left out: {error}"),
        }
        if device != Device::flex() {
            let engine = CmmaTiles::with_loops(&device);
            assert!(!engine.types().is_empty(), "{device:?} has no 16-bit type");
            push(Arc::new(engine.clone()), engine.types());
        }
    }
    engines
}

fn compare_engines(
    name: &str,
    inputs: &[Input],
    ours: impl Fn(&[Tensor<1>], Arc<dyn AttentionEngine>) -> Tensor<1>,
    reference: impl Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    for tested in engines() {
        let name = format!("{name} by {:?}", tested.engine);
        let device = &tested.device;
        let ours = |x: &[_]| ours(x, tested.engine.clone());
        for dtype in tested.types {
            let (exact, plain) = (DType::F64, Device::flex());
            let expected = evaluate(inputs, &plain, exact, dtype, &reference);
            let actual = evaluate(inputs, device, dtype, dtype, &ours);
            let name = format!("{name} in {dtype:?}");
            assert_close(&name, &expected, &actual, ROUNDED * tolerance(dtype));
        }
    }
}

impl Case {
    fn compare_matrices(&self) {
        let ours = |x: &[Tensor<1>], engine| {
            let ([q, k, v], sink) = self.split(x);
            let options = self.options(&q.device());
            flash_attention_with(engine, q, k, v, sink, &options).flatten(0, 3)
        };
        let name = format!("{self:?}");
        compare_engines(&name, &self.inputs(), ours, |x| self.reference(x));
    }
}

#[test]
fn every_width_of_the_matrix_units_is_that_of_the_composition() {
    for width in [16, 48, 64, 96, 128] {
        // With a sink, so that a query which sees one key has a gradient.
        let case = Case::new(1, 35, 35, heads(1, 1, width));
        Case { sink: true, ..case }.compare_matrices();
    }
}

#[test]
fn every_length_of_the_matrix_units_is_that_of_the_composition() {
    for seq in [1, 16, 17, 65, 130] {
        let case = Case::new(1, seq, seq, heads(1, 1, 16));
        Case { sink: true, ..case }.compare_matrices();
    }
}

#[test]
fn groups_and_sequences_use_their_own_matrices() {
    for share in [1, 3] {
        Case::new(2, 35, 35, heads(2 * share, 2, 16)).compare_matrices();
    }
    for (queries, keys) in [(5, 70), (70, 5), (1, 40)] {
        for causal in [false, true] {
            let case = Case::new(2, queries, keys, heads(2, 1, 16));
            Case { causal, ..case }.compare_matrices();
        }
    }
}

#[test]
fn everything_at_once_goes_through_the_matrix_units() {
    for (causal, window) in [(true, None), (false, None), (false, Some((9, 4)))] {
        let case = Case {
            causal,
            window,
            ends: Some(vec![0, 5, 5, 6, 50, 71]),
            sink: true,
            ..Case::new(2, 71, 71, heads(4, 2, 48))
        };
        case.compare_matrices();
    }
}

#[test]
fn matrices_are_read_from_a_joint_projection() {
    let shape = heads(4, 2, 32);
    let inputs = [
        Input::wave([2, 37, shape.features()], 0.3).scaled(0.5, 0.0),
        Input::wave([shape.heads], 0.1),
    ];
    let options = AttentionOptions {
        causal: true,
        scale: Some(0.3),
        ..Default::default()
    };
    let split = |x: &[Tensor<1>]| {
        let qkv = x[0].clone().reshape([2, 37, shape.features()]);
        (qkv, Some(x[1].clone()))
    };
    compare_engines(
        "packed",
        &inputs,
        |x, engine| {
            let (qkv, sink) = split(x);
            flash_attention_packed_with(engine, qkv, shape, sink, &options).flatten(0, 2)
        },
        |x| {
            let (qkv, sink) = split(x);
            composed::flash_attention_packed(qkv, shape, sink, &options).flatten(0, 2)
        },
    );
}

#[test]
fn views_that_no_wide_load_reads_are_taken() {
    let inputs = [
        Input::wave([1, 2, 40, 19], 0.3).scaled(0.5, 0.0),
        Input::wave([1, 33, 1, 18], 0.5).scaled(0.5, 0.0),
    ];
    let options = AttentionOptions::default();
    let split = |x: &[Tensor<1>]| {
        let q = x[0].clone().reshape([1, 2, 40, 19]).swap_dims(1, 2);
        let kv = x[1].clone().reshape([1, 33, 1, 18]);
        (q.narrow(1, 3, 21).narrow(3, 1, 16), kv.narrow(3, 1, 16))
    };
    compare_engines(
        "views",
        &inputs,
        |x, engine| {
            let (q, kv) = split(x);
            flash_attention_with(engine, q, kv.clone(), kv, None, &options).flatten(0, 3)
        },
        |x| {
            let (q, kv) = split(x);
            composed::flash_attention(q, kv.clone(), kv, None, &options).flatten(0, 3)
        },
    );
}

#[test]
fn the_log_sum_exp_of_the_matrix_units_is_that_of_the_portable_kernels() {
    for Tested {
        device,
        engine,
        types,
    } in engines()
    {
        for dtype in types {
            let values = |rows: usize, phase: f64| {
                let input = Input::wave([2, rows, 2, 16], phase);
                plain::<4>(&input, &device, dtype)
            };
            // The first queries are before the first key, and see nothing.
            let (q, k, v) = (values(45, 0.1), values(40, 0.5), values(40, 0.9));
            let options = AttentionOptions {
                causal: true,
                ..Default::default()
            };
            let problem = AttentionProblem::separate(&q, &k, &v, None, &options).unwrap();
            let projections = Projections::Separate { q, k, v };
            let (out, lse) = engine.forward(&problem, projections.clone(), None);
            let (expected, of_portable) = Portable.forward(&problem, projections, None);
            assert_near("out", doubles(out), doubles(expected), 2e-2);
            let lse = [lse, of_portable].map(doubles);
            for (ours, expected) in lse[0].iter().zip(&lse[1]) {
                let near = (ours - expected).abs() < 1e-5 * (1.0 + expected.abs());
                assert!(near || ours == expected, "{ours} and {expected}");
            }
            assert_eq!(lse[0][..5], [f64::NEG_INFINITY; 5]);
        }
    }
}

#[test]
fn windows_and_documents_skip_tiles() {
    // Several tiles of both kinds in each direction, some seen by all rows, some by none.
    for (causal, window) in [(true, Some((70, 0))), (false, Some((3, 90))), (false, None)] {
        let case = Case {
            causal,
            window,
            ends: Some(vec![3, 150, 151, 330]),
            ..Case::new(1, 330, 330, heads(2, 1, 32))
        };
        case.compare_matrices();
    }
    let long = Case::new(1, 200, 400, heads(1, 1, 64));
    long.compare_matrices();
}

#[test]
fn scores_of_any_size_are_taken() {
    for scale in [1e-3, 4.0] {
        let inputs = Case::new(1, 90, 90, heads(1, 1, 32)).inputs();
        let options = AttentionOptions {
            scale: Some(scale),
            causal: true,
            ..Default::default()
        };
        let split = |x: &[Tensor<1>]| [0, 1, 2].map(|i| x[i].clone().reshape([1, 90, 1, 32]));
        compare_engines(
            &format!("scale {scale}"),
            &inputs,
            |x, engine| {
                let [q, k, v] = split(x);
                flash_attention_with(engine, q, k, v, None, &options).flatten(0, 3)
            },
            |x| {
                let [q, k, v] = split(x);
                composed::flash_attention(q, k, v, None, &options).flatten(0, 3)
            },
        );
    }
}

#[test]
fn two_runs_of_an_engine_give_the_same_bits() {
    for tested in engines() {
        for dtype in tested.types {
            let case = Case::new(2, 130, 130, heads(4, 2, 64));
            let run = || {
                let ours = |x: &[Tensor<1>]| {
                    let ([q, k, v], sink) = case.split(x);
                    let options = case.options(&q.device());
                    let engine = tested.engine.clone();
                    flash_attention_with(engine, q, k, v, sink, &options).flatten(0, 3)
                };
                let result = evaluate(&case.inputs(), &tested.device, dtype, dtype, &ours);
                let all = [vec![result.output], result.gradients].concat();
                let bits =
                    |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect::<Vec<_>>();
                all.into_iter().map(bits).collect::<Vec<_>>()
            };
            assert_eq!(run(), run(), "{:?} in {dtype:?}", tested.engine);
        }
    }
}

#[test]
fn what_the_matrix_units_do_not_take_is_refused() {
    let flex = Device::flex();
    let errors = [
        CmmaTiles::new(&flex).unwrap_err().to_string(),
        MmaTiles::new(&flex).unwrap_err().to_string(),
    ];
    for error in errors {
        let expected = "it is not a CubeCL device: use Portable";
        assert!(error.contains(expected), "{error}");
    }
    for tested in engines() {
        let types = &tested.types;
        let refused = |device: &Device, width: usize, dtype: DType, scale: Option<f64>| {
            let (device, engine) = (device.clone(), tested.engine.clone());
            let work = std::panic::AssertUnwindSafe(move || {
                let x = Tensor::<4>::zeros([1, 4, 1, width], (&device, dtype));
                let options = AttentionOptions {
                    scale,
                    ..Default::default()
                };
                flash_attention_with(engine, x.clone(), x.clone(), x, None, &options);
            });
            refused::message(work)
        };
        let device = &tested.device;
        for width in [8, 20, 144] {
            let error = refused(device, width, types[0], None);
            let expected = format!(
                "does not support this problem: heads of width {width}: expected multiples of 16 up to 128"
            );
            assert!(error.contains(&expected), "{error}");
        }
        let error = refused(device, 64, DType::F32, None);
        assert!(
            error.contains("does not support this problem: element type F32: expected one of ["),
            "{error}"
        );
        let name = tested.engine.name();
        let error = refused(&Device::flex(), 64, types[0], None);
        let expected = format!("the engine \"{name}\" was made for");
        assert!(error.contains(&expected), "{error}");
        if name == "mma" {
            let error = refused(device, 64, types[0], Some(-0.5));
            let expected = "does not support this problem: scale -0.5: expected a positive number";
            assert!(error.contains(expected), "{error}");
        }
    }
}

/// Whether a device without `mma.sync` is told what it has not got.
#[test]
fn a_device_without_mma_sync_is_named() {
    for (device, _) in devices() {
        if let Err(error) = MmaTiles::new(&device) {
            let error = error.to_string();
            let is_named = error.contains("no mma.sync of 16x8x16")
                || error.contains("it is not a CubeCL device");
            assert!(is_named, "{error}");
        }
    }
}

#[test]
fn the_engine_of_a_device_with_matrix_units_uses_them_in_16_bits() {
    for Tested {
        device,
        engine,
        types,
    } in engines()
    {
        let window = Some(Window { left: 40, right: 0 });
        for (dtype, heads) in [
            (types[0], heads(2, 1, 64)),
            (*types.last().unwrap(), heads(4, 4, 128)),
        ] {
            // With loops too: the comparison is one of kernels, whatever multiplies.
            for window in [None, window] {
                let compared = compare_with_portable(&*engine, &device, dtype, heads, window);
                assert_eq!(compared, Ok(()), "{engine:?} in {dtype:?}, {heads:?}");
            }
        }
    }
    for (device, types) in devices() {
        let has_units = CmmaTiles::new(&device).map(|engine| engine.types().to_vec());
        for dtype in types {
            let select = |width| {
                let kinds = &EngineKind::AUTOMATIC;
                select_engine(kinds, &device, dtype, heads(2, 1, width), None).unwrap()
            };
            let taken = has_units.as_ref().is_ok_and(|types| types.contains(&dtype));
            let expected = if taken {
                EngineKind::Cmma
            } else {
                EngineKind::Portable
            };
            assert_eq!(select(64).kind, expected, "{dtype:?} on {device:?}");
            // Narrower than a matrix unit.
            let narrow = select(8);
            assert_eq!(
                (narrow.kind, narrow.skipped.len()),
                (EngineKind::Portable, 1)
            );
        }
    }
}
