//! Tests that are not in the conformance suite: reductions in two stages, and buffers.

use insta::assert_snapshot;

use super::*;

#[test]
fn inner_groups_first_give_the_bits_of_all_at_once() {
    for (ranks, inner) in [(4, 2), (8, 2), (8, 4)] {
        let parts: Vec<Vec<usize>> = (0..ranks / inner)
            .map(|part| (part * inner..(part + 1) * inner).collect())
            .collect();
        let across: Vec<Vec<usize>> = (0..inner)
            .map(|index| parts.iter().map(|part| part[index]).collect())
            .collect();
        let results = World::threads(ranks).unwrap().run(|rank| {
            let world = rank.communicator();
            let (part, across) = (
                world.split("part", &parts)?,
                world.split("across", &across)?,
            );
            let value = |i: usize| ((7 * rank.rank() + i) as f32 * 1.618).sin() / 3.0;
            let own = || Buffer::from((0..2000).map(value).collect::<Vec<_>>());
            let shard = part.reduce_scatter(own(), ReduceOp::Sum)?;
            let nested = part.all_gather(across.all_reduce(shard, ReduceOp::Sum)?)?;
            Ok::<_, CommError>(nested == world.all_reduce(own(), ReduceOp::Sum)?)
        });
        assert_eq!(results.unwrap(), vec![true; ranks], "{ranks} by {inner}");
    }
}

#[test]
fn buffers_convert_slice_and_concatenate() {
    for dtype in DType::ALL {
        let whole = buffer(dtype, &[1, 2, 3, 4, 5]);
        assert_eq!(
            (whole.dtype(), whole.len(), whole.is_empty()),
            (dtype, 5, false)
        );
        let parts = [whole.slice(0..2), whole.slice(2..2), whole.slice(2..5)];
        assert_eq!(Buffer::concat(&parts).unwrap(), whole);
        assert_eq!(Buffer::zeros(dtype, 3), buffer(dtype, &[0, 0, 0]));
        assert!(Buffer::empty(dtype).is_empty());
    }
    assert_eq!(Buffer::concat(&[]), Err(BufferError::NoParts));
    let error = Vec::<f32>::try_from(Buffer::from(vec![1u8, 2])).unwrap_err();
    assert_snapshot!(error, @"invalid buffer type: it holds 2 u8, expected f32");
    assert_snapshot!(
        Buffer::concat(&[vec![1u8, 2].into(), vec![1f32].into()]).unwrap_err(),
        @"invalid buffer type: it holds 1 f32, expected u8"
    );
    assert_eq!(DType::ALL.map(DType::size_of), [8, 4, 2, 2, 8, 4, 1]);
}
