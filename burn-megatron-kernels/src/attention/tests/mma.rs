//! Tests of the engine for tensor cores. They run only on devices with tensor cores.

use super::*;

impl Case {
    /// Compares only the engines for tensor cores.
    fn compare_matrices(&self) {
        let widths = (self.heads.width, self.value_width);
        let ours = |x: &[_], engine| self.by(engine, x);
        let reference = |x: &[_]| self.reference(x);
        compare_matrix_engines(
            &format!("{self:?}"),
            widths,
            &self.inputs(),
            ours,
            reference,
        );
    }
}

#[test]
fn the_log_sum_exp_of_the_matrix_units_is_that_of_the_portable_kernels() {
    for Tested {
        device,
        engine,
        types,
    } in matrix_engines()
    {
        for dtype in types {
            let values = |rows: usize, phase: f64| {
                let input = Input::wave([2, rows, 2, 16], phase);
                plain::<4>(&input, &device, dtype)
            };
            // The first queries have positions before the first key, so no key is visible to them.
            let (q, k, v) = (values(45, 0.1), values(40, 0.5), values(40, 0.9));
            let options = AttentionOptions {
                causal: true,
                ..Default::default()
            };
            let problem = AttentionProblem::separate([&q, &k, &v], None, &options).unwrap();
            let inputs = AttentionInputs {
                projections: Projections::Separate { q, k, v },
                sink: None,
            };
            let found = engine.forward(&problem, inputs.clone());
            let expected = Portable.forward(&problem, inputs);
            assert_near("out", doubles(found.out), doubles(expected.out), 2e-2);
            let lse = [found.lse, expected.lse].map(doubles);
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
    // There are several tiles in each direction. Some tiles are visible to all rows, and some to no row.
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
        let case = Case::new(1, 90, 90, heads(1, 1, 32));
        Case {
            scale: Some(scale),
            ..case
        }
        .compare_matrices();
    }
}

#[test]
fn two_runs_of_an_engine_give_the_same_bits() {
    for tested in matrix_engines() {
        for dtype in tested.types {
            let case = Case::new(2, 130, 130, heads(4, 2, 64));
            let run = || {
                let ours = |x: &[_]| case.by(tested.engine.clone(), x);
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
    let error = MmaTiles::new(&Device::flex()).unwrap_err().to_string();
    let expected = "the device is not a CubeCL device: use Portable";
    assert!(error.contains(expected), "{error}");
    for tested in matrix_engines() {
        let dtype = tested.types[0];
        let refused =
            |device: &Device, [width, values]: [usize; 2], dtype: DType, scale: Option<f64>| {
                let (device, engine) = (device.clone(), tested.engine.clone());
                let work = std::panic::AssertUnwindSafe(move || {
                    let x = |width| Tensor::<4>::zeros([1, 4, 1, width], (&device, dtype));
                    let options = AttentionOptions {
                        scale,
                        ..Default::default()
                    };
                    flash_attention_with(engine, x(width), x(width), x(values), None, &options);
                });
                refused::message(work)
            };
        let device = &tested.device;
        for (widths, expected) in [
            (
                [8; 2],
                "heads of width 8: expected multiples of 16 up to 256",
            ),
            (
                [20; 2],
                "heads of width 20: expected multiples of 16 up to 256",
            ),
            (
                [64, 20],
                "values of width 20: expected multiples of 16 up to the 64 of the keys",
            ),
            (
                [64, 80],
                "values of width 80: expected multiples of 16 up to the 64 of the keys",
            ),
        ] {
            let error = refused(device, widths, dtype, None);
            let expected = format!("does not support this problem: {expected}");
            assert!(error.contains(&expected), "{error}");
        }
        let error = refused(device, [64; 2], DType::F32, None);
        assert!(
            error.contains("does not support this problem: element type F32: expected one of ["),
            "{error}"
        );
        let error = refused(&Device::flex(), [64; 2], dtype, None);
        assert!(error.contains("the engine \"mma\" was made for"), "{error}");
        let error = refused(device, [64; 2], dtype, Some(-0.5));
        let expected = "does not support this problem: scale -0.5: expected a positive number";
        assert!(error.contains(expected), "{error}");
    }
}

/// The error on a device that does not support `mma.sync` names the missing feature.
#[test]
fn a_device_without_mma_sync_is_named() {
    for (device, _) in devices() {
        if let Err(error) = MmaTiles::new(&device) {
            let error = error.to_string();
            let is_named = error.contains("does not support mma.sync of 16x8x16")
                || error.contains("the device is not a CubeCL device");
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
    } in matrix_engines()
    {
        let window = Some(Window { left: 40, right: 0 });
        for (dtype, heads, value_width) in [
            (types[0], heads(2, 1, 64), 64),
            (*types.last().unwrap(), heads(4, 4, 128), 128),
            (types[0], heads(2, 2, 192), 128),
        ] {
            for window in [None, window] {
                let compared =
                    compare_with_portable(&*engine, &device, dtype, (heads, value_width), window);
                assert_eq!(compared, Ok(()), "{engine:?} in {dtype:?}, {heads:?}");
            }
        }
    }
    for (device, types) in devices() {
        let has_units = MmaTiles::new(&device).map(|engine| engine.types().to_vec());
        for dtype in types {
            let select = |width| {
                let kinds = &EngineKind::ALL;
                select_engine(kinds, &device, dtype, (heads(2, 1, width), width), None).unwrap()
            };
            let taken = has_units.as_ref().is_ok_and(|types| types.contains(&dtype));
            let expected = if taken {
                EngineKind::Mma
            } else {
                EngineKind::Portable
            };
            assert_eq!(select(64).kind, expected, "{dtype:?} on {device:?}");
            // The heads are narrower than a tile of the tensor cores.
            let narrow = select(8);
            assert_eq!(
                (narrow.kind, narrow.skipped.len()),
                (EngineKind::Portable, 1)
            );
        }
    }
}
