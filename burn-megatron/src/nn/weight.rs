//! The weight of a linear layer.

use burn::module::Param;
use burn::tensor::Tensor;

use super::anchored_value;
use super::forward_context::{self, is_tracked};
use super::hook::{HookHandle, ParameterHook, Pass};

/// The weight of a linear layer, and the path that its gradient takes.
#[derive(Clone, Debug)]
pub struct Weight {
    pub(super) tensor: Tensor<2>,
    pub(super) hooked: Option<HookedWeight>,
    /// Whether a hooked weight is stored as `[out, in]`.
    pub(super) transposed: bool,
}

/// A weight with a [`ParameterHook`].
#[derive(Clone, Debug)]
pub(super) struct HookedWeight {
    pub handle: HookHandle,
    /// The tensor that the module holds, of the weight's shape.
    base: Tensor<2>,
    /// Whether the product passes the gradient to the hook. Then the graph does not hold the value,
    /// which may be gathered again for the backward.
    pub(super) takes_gradient: bool,
    /// Whether the weight is frozen: the graph does not hold its value either.
    pub(super) is_frozen: bool,
}

impl HookedWeight {
    /// The value, as floats.
    pub fn value(&self, pass: Pass) -> Tensor<2> {
        self.handle.value_in(self.base.clone(), pass).0
    }

    /// The hook that takes the gradient, if the graph does not.
    pub fn taking(&self) -> Option<&HookHandle> {
        Some(&self.handle).filter(|_| self.takes_gradient)
    }
}

impl Weight {
    /// The weight `[in, out]` of a layer with the input `x`.
    ///
    /// With a [`ParameterHook`] the product itself passes the gradient to the sink, so that it can be deferred.
    pub fn of(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        let hooked = match (ParameterHook::of(param), ParameterHook::of_frozen(param)) {
            (Some(hook), _) if is_tracked(x) => HookedWeight::taking_gradient(hook, param),
            (_, Some(hook)) if is_tracked(x) => HookedWeight::frozen(hook, param),
            _ => return anchored_value(param, x).into(),
        };
        Self {
            tensor: hooked.handle.value(hooked.base.clone()).0,
            hooked: Some(hooked),
            transposed: false,
        }
    }

    /// The same for a product that reads the value from the hook itself, which may hold it in 8 bits
    /// only.
    pub(super) fn unfetched(param: &Param<Tensor<2>>, x: &Tensor<3>) -> Self {
        if let Some(hook) = ParameterHook::of_frozen(param) {
            hook.handle().note();
            let hooked = HookedWeight::frozen(hook, param);
            return Self {
                tensor: hooked.base.clone(),
                hooked: Some(hooked),
                transposed: false,
            };
        }
        let Some(hook) = ParameterHook::of(param) else {
            return anchored_value(param, x).into();
        };
        hook.handle().note();
        let hooked = if is_tracked(x) {
            HookedWeight::taking_gradient(hook, param)
        } else {
            HookedWeight {
                handle: hook.handle().clone(),
                base: param.base(),
                takes_gradient: false,
                is_frozen: false,
            }
        };
        let tensor = match (hooked.takes_gradient, forward_context::anchor().is_some()) {
            (true, _) => hooked.base.clone(),
            // The gradient comes back through the graph.
            (false, true) => param.val(),
            (false, false) => {
                hooked.handle.expect_unrecorded();
                hooked.base.clone()
            }
        };
        Self {
            tensor,
            hooked: Some(hooked),
            transposed: false,
        }
    }

    /// Whether it has a gradient.
    pub(super) fn trains(&self) -> bool {
        match &self.hooked {
            // In a recording every tensor counts as tracked.
            Some(hooked) if hooked.is_frozen => false,
            hooked => {
                let takes_gradient = hooked.as_ref().is_some_and(|it| it.takes_gradient);
                takes_gradient || is_tracked(&self.tensor)
            }
        }
    }

    /// The value `[in, out]`, and the hook that takes its gradient, if the graph does not.
    pub(super) fn into_parts(self) -> (Tensor<2>, Option<HookedWeight>) {
        (self.tensor, self.hooked)
    }

    /// The same weight, stored as `[out, in]`.
    pub fn transposed(self) -> Self {
        Self {
            tensor: self.tensor.transpose(),
            transposed: !self.transposed,
            ..self
        }
    }
}

impl HookedWeight {
    /// A weight whose gradient the product passes to the hook; announces that gradient.
    fn taking_gradient(hook: &ParameterHook, param: &Param<Tensor<2>>) -> Self {
        let handle = hook.handle().clone();
        handle.expect();
        Self {
            handle,
            base: param.base(),
            takes_gradient: true,
            is_frozen: false,
        }
    }

    /// A weight without a gradient.
    fn frozen(hook: &ParameterHook, param: &Param<Tensor<2>>) -> Self {
        Self {
            handle: hook.handle().clone(),
            base: param.base(),
            takes_gradient: false,
            is_frozen: true,
        }
    }
}

impl From<Tensor<2>> for Weight {
    /// A weight whose gradient stays in the graph.
    fn from(tensor: Tensor<2>) -> Self {
        Self {
            tensor,
            hooked: None,
            transposed: false,
        }
    }
}
