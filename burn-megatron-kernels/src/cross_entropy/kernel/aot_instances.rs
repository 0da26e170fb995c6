//! AOT instances of cross entropy.

use cubecl::ir::{ElemType, IntKind};

use super::combine::{LossScalesCompilationArg, UNITS, combine_kernel};
use super::gradient::{
    GradientScalesCompilationArg, VocabularyColumnsCompilationArg, gradient_kernel,
};
use super::loss_and_gradient::loss_and_gradient_kernel;
use super::statistics::statistics_kernel;
use crate::cube::instance::{AotList, default_fields, instance, types};

default_fields!(VocabularyColumnsCompilationArg [width first valid tokens]);
default_fields!(GradientScalesCompilationArg [keep share twice_z nan]);
default_fields!(LossScalesCompilationArg [keep share smoothing z nan]);

/// The number of units of the row kernels for a large vocabulary.
const ROW_UNITS: u32 = 1024;

/// Adds every kernel of cross entropy in every type.
pub(crate) fn aot_instances(list: &mut AotList) {
    let index = ElemType::Int(IntKind::I32);
    let ignore = Some(-100);
    for (name, dtype, vector) in types() {
        instance!(
            list.streaming("cross_entropy/statistics/{name}/131072"), ROW_UNITS,
            statistics_kernel::StatisticsKernel [_ _ _ _ _ _ _ _]
            (vector, ignore, ROW_UNITS, true, [dtype, index])
        );
        instance!(
            list.streaming("cross_entropy/gradient/{name}/131072"), ROW_UNITS,
            gradient_kernel::GradientKernel [_ _ _ _ _ _ _ _]
            (vector, ignore, ROW_UNITS, [dtype, index])
        );
        instance!(
            list.streaming("cross_entropy/loss_and_gradient/{name}/131072"), ROW_UNITS,
            loss_and_gradient_kernel::LossAndGradientKernel [_ _ _ _ _ _ _ _ _]
            (vector, false, ignore, ROW_UNITS, true, [dtype, index])
        );
    }
    instance!(
        list.other("cross_entropy/combine/f32"), UNITS,
        combine_kernel::CombineKernel [_ _ _ _ _ _ _ _] (true, ignore, index)
    );
}
