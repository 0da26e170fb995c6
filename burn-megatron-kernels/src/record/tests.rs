use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_ir::OperationIr;

use super::*;
use crate::flat::scale;
use crate::function::{Function, apply};
use crate::norm::{NormOptions, rms_norm};

/// Computes the sum of the values on the host.
#[derive(Debug)]
struct HostSum;

impl Function for HostSum {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let x = Tensor::<1>::from_dispatch(inputs.remove(0));
        let device = x.device();
        let sum = x.into_data().iter::<f32>().sum::<f32>();
        (
            Tensor::<1>::from_floats([sum], &device).into_dispatch(),
            vec![],
        )
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![Some(gradient)]
    }
}

/// A tensor `[ROWS, WIDTH]` of f32 takes 8 GiB.
const ROWS: usize = 1 << 15;
const WIDTH: usize = 1 << 16;

#[test]
fn a_kernel_has_shapes_and_saves_tensors_without_memory() {
    let ((), recording) = record(ShapeSettings::default(), |device| {
        let x = Tensor::<2>::empty([ROWS, WIDTH], (device, DType::F32));
        let weight = Tensor::<1>::empty([WIDTH], (device, DType::F32));
        let y = rms_norm(x, weight, NormOptions::new(1e-5));
        assert_eq!(y.dims(), [ROWS, WIDTH]);
        backward_since(0);
    })
    .unwrap();
    let [call] = &recording.calls[..] else {
        panic!("{:?}", recording.calls)
    };
    assert_eq!(call.name, "NormFunction");
    let shapes = |tensors: &[TensorIr]| -> Vec<Vec<usize>> {
        tensors.iter().map(|tensor| tensor.shape.to_vec()).collect()
    };
    assert_eq!(shapes(&call.inputs), [vec![ROWS, WIDTH], vec![WIDTH]]);
    // The input, the weight, and one number per row.
    let saved: usize = call.saved.iter().map(|it| it.shape.num_elements()).sum();
    assert_eq!(saved, ROWS * WIDTH + WIDTH + ROWS);
    let gradients = call.gradients.clone().unwrap();
    let gradients: Vec<_> = gradients.inputs.into_iter().map(Option::unwrap).collect();
    assert_eq!(shapes(&gradients), [vec![ROWS, WIDTH], vec![WIDTH]]);
    let is_kernel = |step: &&RecordedStep| matches!(step, RecordedStep::Operation(OperationIr::Custom(custom)) if custom.id.contains("norm"));
    assert!(recording.steps.iter().any(|step| is_kernel(&step)));
}

#[test]
fn an_operation_that_reads_values_is_named() {
    let error = record(ShapeSettings::default(), |device| {
        let x = Tensor::<1>::empty([4], device);
        let _: Tensor<1> = apply(vec![x.into_dispatch()], HostSum);
    })
    .unwrap_err();
    let RecordError::NoShapes { operation, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(operation, "HostSum");
    // After the error, the thread can record again.
    assert!(record(ShapeSettings::default(), |_| ()).is_ok());
}

#[test]
fn recordings_do_not_nest() {
    let inner = record(ShapeSettings::default(), |_| {
        record(ShapeSettings::default(), |_| ()).err()
    });
    assert_eq!(inner.unwrap().0, Some(RecordError::Nested));
}

/// The error contains the panic message, and nothing is printed.
#[test]
fn a_panic_in_a_recording_prints_nothing() {
    let printed = Arc::new(AtomicUsize::new(0));
    let (count, own) = (printed.clone(), std::thread::current().id());
    let counting = move |_: &panic::PanicHookInfo<'_>| {
        // Other tests panic on other threads.
        if std::thread::current().id() == own {
            count.fetch_add(1, Ordering::Relaxed);
        }
    };
    assert!(record(ShapeSettings::default(), |_| ()).is_ok());
    let before = panic::take_hook();
    panic::set_hook(outside_recordings(Box::new(counting)));
    let error = record(ShapeSettings::default(), |_| panic!("no such shape")).unwrap_err();
    let inside = printed.load(Ordering::Relaxed);
    assert!(panic::catch_unwind(|| panic!("outside")).is_err());
    panic::set_hook(before);
    assert!(error.to_string().contains("no such shape"), "{error}");
    assert_eq!((inside, printed.load(Ordering::Relaxed)), (0, 1));
}

/// A tensor that was created before `begin_variables` has no gradient.
#[test]
fn constants_have_no_gradient() {
    let ((), recording) = record(ShapeSettings::default(), |device| {
        let weight = Tensor::<1>::empty([8], (device, DType::F32));
        begin_variables();
        let x = Tensor::<2>::empty([4, 8], (device, DType::F32));
        rms_norm(x, weight, NormOptions::new(1e-5));
        backward_since(0);
    })
    .unwrap();
    let gradients = recording.calls[0].gradients.clone().unwrap();
    let has_gradient: Vec<_> = gradients.inputs.iter().map(Option::is_some).collect();
    assert_eq!(has_gradient, [true, false]);
}

/// Burn supports 65,536 capture devices per process.
#[test]
fn recordings_do_not_run_out_of_devices() {
    for _ in 0..70_000 {
        record(ShapeSettings::default(), |_| ()).unwrap();
    }
}

#[test]
fn a_kernel_names_the_input_that_it_overwrites() {
    let ((), recording) = record(ShapeSettings::default(), |device| {
        let x = Tensor::<2>::empty([4, 8], (device, DType::F32));
        let factor = Tensor::<1>::empty([1], (device, DType::F32));
        scale(x, factor);
    })
    .unwrap();
    let mut steps = recording.steps.iter();
    let pair = steps.find_map(|step| match step {
        RecordedStep::Operation(OperationIr::Custom(kernel)) => in_place(kernel),
        _ => None,
    });
    let (input, output) = pair.unwrap();
    assert_eq!(input.shape.to_vec(), [4, 8]);
    assert_eq!(output.shape, input.shape);
}
