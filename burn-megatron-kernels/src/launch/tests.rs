use burn::tensor::{Device, Int, Tensor};

use super::*;
use crate::cpu::{for_float, slice, tensor};
use crate::testing::devices;

/// Multiplies `x` by a factor. The input is overwritten if no other tensor shares its memory.
#[derive(Debug)]
struct Scale(f32);

impl DeviceOp for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        use crate::cpu::{Element, Real};
        let x = &inputs[0];
        for_float!(x.dtype(), E => {
            let factor = <E as Element>::Wide::of(f64::from(self.0));
            let y = slice::<E>(x).iter().map(|x| E::narrow(x.wide() * factor)).collect();
            vec![tensor::<E>(y, x.layout().shape().clone())]
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::scale(inputs.remove(0), self.0)]
    }
}

#[cfg(feature = "cubecl")]
mod kernel {
    use burn::backend::TensorMetadata;
    use burn::backend::cubecl::dtype_to_storage_type;
    use burn_cubecl::tensor::CubeTensor;
    use cubecl::prelude::*;

    use crate::cube::{RowPlan, empty, launch};

    #[cube(launch_unchecked)]
    fn scale_kernel<F: Float, N: Size>(
        x: &Tensor<Vector<F, N>>,
        y: &mut Tensor<Vector<F, N>>,
        factor: f32,
        rows: u32,
        #[comptime] columns: usize,
        #[comptime] units: u32,
        #[define(F)] _dtype: ElemType,
    ) {
        let row = CUBE_POS;
        if row < rows as usize {
            let mut column = UNIT_POS as usize;
            while column < columns {
                let at = row * columns + column;
                let value = Vector::<f32, N>::cast_from(x[at]) * Vector::new(factor);
                y[at] = Vector::cast_from(value);
                column += units as usize;
            }
        }
    }

    pub(super) fn scale(x: CubeTensor, factor: f32) -> CubeTensor {
        let shape = x.shape();
        let width = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / width.max(1);
        let (client, dtype) = (x.client.clone(), x.dtype);
        let y = empty(&x, shape, dtype);
        let plan = RowPlan::new(&client, dtype, width);
        unsafe {
            launch!(
                scale_kernel,
                [client, rows, plan.units],
                [plan.vector],
                [x, &y],
                (factor, rows as u32),
                (plan.columns, plan.units, dtype_to_storage_type(dtype))
            );
        }
        y
    }
}

fn scaled<const D: usize>(x: Tensor<D>, factor: f32) -> Tensor<D> {
    Tensor::from_dispatch(launch_one(Scale(factor), vec![x.into_dispatch()]))
}

#[test]
fn a_kernel_runs_on_every_device_in_every_type() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for width in [1, 7, 33, 1000] {
                let x = Tensor::<1, Int>::arange(0..3 * width, &device)
                    .float()
                    .cast(dtype);
                // Multiples of one half up to 2048 are exact.
                let x = x.clone() / 2.0;
                let y = scaled(x.clone().reshape([3, width as i32]), 2.0);
                let expected = (x * 2.0).reshape([3, width as i32]);
                y.into_data().assert_eq(&expected.into_data(), true);
            }
        }
    }
}

#[test]
fn strided_sliced_and_empty_inputs_are_taken() {
    for (device, _) in devices() {
        let x = Tensor::<1, Int>::arange(0..60, &device)
            .float()
            .reshape([5, 12]);
        let turned = scaled(x.clone().transpose(), 3.0);
        turned
            .into_data()
            .assert_eq(&(x.clone().transpose() * 3.0).into_data(), true);
        let cut = x.clone().narrow(1, 3, 5).narrow(0, 1, 3);
        scaled(cut.clone(), 3.0)
            .into_data()
            .assert_eq(&(cut * 3.0).into_data(), true);
        let none = Tensor::<2>::zeros([0, 12], &device);
        assert_eq!(scaled(none, 3.0).dims(), [0, 12]);
    }
}

#[test]
fn neighbours_of_a_kernel_see_its_output() {
    for (device, _) in devices() {
        let x = Tensor::<1, Int>::arange(0..64, &device).float();
        let y = scaled(x.clone() * 2.0 + 1.0, 3.0) - 3.0;
        y.into_data().assert_eq(&(x * 6.0).into_data(), true);
    }
}

#[test]
#[should_panic(
    expected = "scale: tensor [65536, 65537] has too many elements: expected at most 4294967295"
)]
fn more_elements_than_can_be_counted_are_refused() {
    let x = Tensor::<1>::ones([1], &Device::flex()).expand([65536, 65537]);
    scaled::<2>(x, 1.0);
}

#[cfg(feature = "wgpu")]
#[test]
#[should_panic(expected = "scale does not support F64 on")]
fn a_type_that_the_device_lacks_is_refused() {
    let x = Tensor::<1>::from_data([1.0f32], &Device::wgpu(Default::default()));
    scaled(x.cast(burn::tensor::DType::F64), 1.0);
}
