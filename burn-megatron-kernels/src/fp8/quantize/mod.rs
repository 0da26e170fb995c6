//! Quantisers: from floats to codes and scales, with the largest magnitude on the way.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, FloatDType, Int, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{mx_words, words};
use super::{BLOCK, Format, Fp8Matrix, Scales};
use crate::KernelError;
use crate::error::accept;
use crate::launch::{Kernel, Spec, launch, launch_one};

mod cpu;

const NAME: &str = "quantize";

/// How scales are found.
#[derive(Clone, Debug)]
pub enum Scaling {
    /// One for the whole matrix, given: what values are multiplied with before they are encoded,
    /// `[1]` in f32.
    Tensor(Tensor<1>),
    /// One for 128 elements of a row (or of a column, for the columnwise copy).
    Blocks {
        /// Whether 128 rows share it too, so that both copies have the same codes.
        square: bool,
        /// Whether scales are rounded down to powers of two.
        power_of_two: bool,
    },
    /// One E8M0 for 32 elements of a row (or of a column).
    Mx,
}

/// Which copies are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ways {
    /// `[rows, columns]`: a product sums over the columns.
    pub rowwise: bool,
    /// `[columns, rows]`: a product sums over the rows.
    pub columnwise: bool,
}

impl Ways {
    /// Both copies.
    pub const BOTH: Self = Self {
        rowwise: true,
        columnwise: true,
    };
    /// The rowwise copy.
    pub const ROWWISE: Self = Self {
        rowwise: true,
        columnwise: false,
    };
    /// The columnwise copy.
    pub const COLUMNWISE: Self = Self {
        rowwise: false,
        columnwise: true,
    };
}

/// What [`quantize`] gives.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The rowwise copy, if asked for.
    pub rowwise: Option<Fp8Matrix>,
    /// The columnwise copy, if asked for.
    pub columnwise: Option<Fp8Matrix>,
    /// `[2]` in f32: the largest magnitude (NaN if there is one), and how many values were beyond the
    /// largest of the format.
    pub seen: Tensor<1>,
}

/// How the scale follows from the largest magnitude of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CurrentScale {
    /// The least magnitude that is taken for the largest one.
    pub epsilon: f32,
    /// Whether the scale is rounded down to a power of two.
    pub power_of_two: bool,
}

/// Quantises a matrix in one pass over it.
pub fn quantize(x: Tensor<2>, format: Format, scaling: &Scaling, ways: Ways) -> Quantized {
    accept(check(format));
    let x = match x.dtype() {
        DType::F64 => x.cast(FloatDType::F32),
        _ => x,
    };
    let mut inputs = vec![x.clone().into_dispatch()];
    let kind = match scaling {
        Scaling::Tensor(scale) => {
            inputs.push(scale.clone().into_dispatch());
            Kind::Tensor
        }
        Scaling::Blocks {
            square,
            power_of_two,
        } => Kind::Blocks {
            square: *square,
            power_of_two: *power_of_two,
        },
        Scaling::Mx => Kind::Mx,
    };
    let [rows, columns] = x.dims();
    let mut outputs = launch(Quantize { format, kind, ways }, inputs).into_iter();
    let mut next = || match outputs.next() {
        Some(output) => output,
        None => unreachable!("a quantiser gives what it promised"),
    };
    let mut copy = |made: bool, depth: usize| {
        made.then(|| Fp8Matrix {
            codes: Tensor::from_dispatch(next()),
            scales: kind.scales(next()),
            format,
            depth,
        })
    };
    let (rowwise, columnwise) = (copy(ways.rowwise, columns), copy(ways.columnwise, rows));
    Quantized {
        rowwise,
        columnwise,
        seen: Tensor::from_dispatch(next()),
    }
}

/// The largest magnitude of a tensor, `[1]` in f32: NaN if there is one, 0 of nothing.
pub fn amax(x: Tensor<2>) -> Tensor<1> {
    let x = match x.dtype() {
        DType::F64 => x.cast(FloatDType::F32),
        _ => x,
    };
    Tensor::from_dispatch(launch_one(Amax, vec![x.into_dispatch()]))
}

/// The scale for a tensor whose largest magnitude is `amax`, both `[1]` in f32: `max / amax`; 1 where
/// `amax` is 0, infinite or NaN, and the largest float where the quotient is infinite.
pub fn current_scale(amax: Tensor<1>, format: Format, options: CurrentScale) -> Tensor<1> {
    Tensor::from_dispatch(launch_one(
        ScaleOf { format, options },
        vec![amax.into_dispatch()],
    ))
}

/// The values of a quantised matrix, `[rows, depth]` in f32: each code times its scale.
pub fn dequantize(matrix: &Fp8Matrix) -> Tensor<2> {
    let kind = match &matrix.scales {
        Scales::Tensor(_) => Kind::Tensor,
        Scales::Blocks { height, .. } => Kind::Blocks {
            square: *height == BLOCK,
            power_of_two: false,
        },
        Scales::Mx(_) => Kind::Mx,
    };
    let kernel = Dequantize {
        format: matrix.format,
        kind,
        depth: matrix.depth,
    };
    Tensor::from_dispatch(launch_one(kernel, matrix.tensors().to_vec()))
}

fn check(format: Format) -> Result<(), KernelError> {
    match format {
        Format::E4M3 | Format::E5M2 => Ok(()),
        Format::E2M1 => Err(KernelError::Option {
            operation: NAME,
            name: "format",
            value: "E2M1".into(),
            fits: "E4M3 or E5M2",
        }),
    }
}

/// [`Scaling`] without its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Tensor,
    Blocks { square: bool, power_of_two: bool },
    Mx,
}

impl Kind {
    fn scales(self, tensor: DispatchTensor) -> Scales {
        match self {
            Self::Tensor => Scales::Tensor(Tensor::from_dispatch(tensor)),
            Self::Blocks { square, .. } => Scales::Blocks {
                scales: Tensor::from_dispatch(tensor),
                height: if square { BLOCK } else { 1 },
            },
            Self::Mx => Scales::Mx(Tensor::<2, Int>::from_dispatch(tensor)),
        }
    }

    fn spec(self, [rows, depth]: [usize; 2]) -> Spec {
        match self {
            Self::Tensor => Spec::new([1], DType::F32),
            Self::Blocks { square, .. } => {
                let height = if square { BLOCK } else { 1 };
                Spec::new([rows.div_ceil(height), depth.div_ceil(BLOCK)], DType::F32)
            }
            Self::Mx => Spec::new([rows, mx_words(depth)], DType::U32),
        }
    }
}

/// Inputs: the matrix, and the scale where it is given.
#[derive(Clone, Copy, Debug)]
struct Quantize {
    format: Format,
    kind: Kind,
    ways: Ways,
}

impl Kernel for Quantize {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let [rows, columns] = [inputs[0].shape[0], inputs[0].shape[1]];
        let copy = |[rows, depth]: [usize; 2]| {
            [
                Spec::new([rows, words(depth)], DType::U32),
                self.kind.spec([rows, depth]),
            ]
        };
        let mut all = vec![];
        if self.ways.rowwise {
            all.extend(copy([rows, columns]));
        }
        if self.ways.columnwise {
            all.extend(copy([columns, rows]));
        }
        all.push(Spec::new([2], DType::F32));
        all
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::quantize(self, &inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, _inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        unimplemented!("the kernels come next")
    }
}

/// Input: a matrix.
#[derive(Debug)]
struct Amax;

impl Kernel for Amax {
    fn name(&self) -> &'static str {
        "amax"
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([1], DType::F32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::amax(&inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, _inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        unimplemented!("the kernels come next")
    }
}

/// Input: the largest magnitude.
#[derive(Debug)]
struct ScaleOf {
    format: Format,
    options: CurrentScale,
}

impl Kernel for ScaleOf {
    fn name(&self) -> &'static str {
        "current_scale"
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([1], DType::F32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::scale_of(self, &inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, _inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        unimplemented!("the kernels come next")
    }
}

/// Inputs: codes and scales.
#[derive(Clone, Copy, Debug)]
struct Dequantize {
    format: Format,
    kind: Kind,
    depth: usize,
}

impl Kernel for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([inputs[0].shape[0], self.depth], DType::F32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::dequantize(self, &inputs)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, _inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        unimplemented!("the kernels come next")
    }
}
