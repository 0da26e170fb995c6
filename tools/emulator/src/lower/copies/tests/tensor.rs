//! Tests of copies of boxes of a tensor.

use super::{HEAD, run, undefined, wait};
use crate::machine::Fault;
use crate::tensor_map::{SIZE, Tensor, encode_im2col, encode_tiled};
use crate::testing::{kernel, run_on};

/// The offset of the tensor in the buffer, behind its map, and the offset of the copied box, behind the tensor.
const TENSOR: usize = SIZE;
const COPY: usize = 12 * 1024;

/// Copies a box to shared memory and from there to `COPY` in the buffer, or in the opposite direction. The kernel
/// writes the address of the tensor into the map.
fn tensor(
    map: &[u8; SIZE],
    rank: usize,
    at: &[i32],
    more: &str,
    store: bool,
    buffer: &mut [u8],
) -> Result<(), Fault> {
    buffer[..SIZE].copy_from_slice(map);
    let at: Vec<_> = at.iter().map(i32::to_string).collect();
    let at = at.join(", ");
    let form = if more.is_empty() { "tile" } else { "im2col" };
    let bytes = u32::from_le_bytes([
        buffer[SIZE - 4],
        buffer[SIZE - 3],
        buffer[SIZE - 2],
        buffer[SIZE - 1],
    ]);
    let wait = wait("W", 0);
    let copy = |from: &str, to: &str, address: &str, target: &str, all: u32| {
        format!(
            "mov.u32 %r6, 0;
            mov.u32 %r7, %r1;
            add.u64 %d3, %data, {COPY};
            LOOP:
            ld.{from}.v4.u32 {{%r8, %r9, %r10, %r11}}, [{address}];
            st.{to}.v4.u32 [{target}], {{%r8, %r9, %r10, %r11}};
            add.u32 %r7, %r7, 16;
            add.u64 %d3, %d3, 16;
            add.u32 %r6, %r6, 16;
            setp.lt.u32 %p3, %r6, {all};
            @%p3 bra LOOP;"
        )
    };
    let prepare = format!("add.u64 %d4, %data, {TENSOR};\nst.global.u64 [%data+8], %d4;");
    let body = if store {
        let copy = copy("global", "shared", "%d3", "%r7", 4096);
        let form = if more.is_empty() {
            "tile"
        } else {
            "im2col_no_offs"
        };
        format!(
                "{prepare}{copy}
                cp.async.bulk.tensor.{rank}d.global.shared::cta.{form}.bulk_group [%data, {{{at}}}], [%r1];
                cp.async.bulk.commit_group;
                cp.async.bulk.wait_group 0;"
            )
    } else {
        let copy = copy("shared", "global", "%r7", "%d3", bytes);
        format!(
                "{prepare}
                mbarrier.init.shared.b64 [%r2], 1;
                cp.async.bulk.tensor.{rank}d.shared::cluster.global.{form}.mbarrier::complete_tx::bytes [%r1], [%data, {{{at}}}], [%r2]{more};
                mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {bytes};
                {wait}{copy}"
            )
    };
    let outcome = run_on(&kernel(&format!("{HEAD}{body}")), 1, buffer);
    outcome.map(|_| ()).map_err(|failure| failure.fault)
}

/// Returns a buffer whose tensor contains the numbers from 1 as halves.
fn buffer() -> Vec<u8> {
    let mut buffer = vec![0xee; COPY + 4096];
    for (number, half) in buffer[TENSOR..COPY]
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .enumerate()
    {
        *half = (number as u16 + 1).to_le_bytes();
    }
    buffer
}

fn half(buffer: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([buffer[at], buffer[at + 1]])
}

/// Returns the tensor map of halves. Its unused last word contains the number of bytes that a copy moves.
fn tiled(
    sizes: &[u64],
    strides: &[u64],
    steps: &[u32],
    lengths: &[u32],
    swizzle: u32,
    bytes: u32,
) -> [u8; SIZE] {
    let tensor = Tensor {
        data_type: 6,
        address: 0,
        sizes,
        strides,
        steps,
        interleave: 0,
        swizzle,
        fill: 0,
    };
    let mut map = encode_tiled(&tensor, lengths).unwrap_or_else(|error| panic!("{error}"));
    map[SIZE - 4..].copy_from_slice(&bytes.to_le_bytes());
    map
}

#[test]
fn tiles_are_swizzled_and_filled_up() -> Result<(), Fault> {
    // 20 rows of 70 halves, 160 bytes apart, and a box of 16 rows. A part of the box lies outside of the tensor.
    for (swizzle, width) in [(0, 64u32), (1, 16), (2, 32), (3, 64), (3, 32)] {
        for (x, y) in [(0i32, 0i32), (8, 2), (-3, -5), (61, 11), (-100, 0), (0, 30)] {
            let map = tiled(
                &[70, 20],
                &[160],
                &[1, 1],
                &[width, 16],
                swizzle,
                width * 32,
            );
            let mut buffer = buffer();
            tensor(&map, 2, &[x, y], "", false, &mut buffer)?;
            for (row, column) in
                (0..16).flat_map(|row| (0..width as usize).map(move |column| (row, column)))
            {
                let (sx, sy) = (x + column as i32, y + row as i32);
                let inside = (0..70).contains(&sx) && (0..20).contains(&sy);
                let wanted = if inside { (sy * 80 + sx) as u16 + 1 } else { 0 };
                // Rows are adjacent. In each line of 128 bytes, pieces of 16 bytes are exchanged depending on the
                // index of the line.
                let byte = (row * width as usize + column) * 2;
                let line = byte / 128;
                let turn = [0, line % 2, line % 4, line % 8][swizzle as usize];
                let place = line * 128 + ((byte % 128 / 16) ^ turn) * 16 + byte % 16;
                assert_eq!(
                    half(&buffer, COPY + place),
                    wanted,
                    "{swizzle} {width} ({x}, {y}): ({row}, {column})"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn tiles_of_five_dimensions_with_steps() -> Result<(), Fault> {
    let (sizes, strides) = ([8, 5, 4, 3, 2], [16, 96, 400, 1216]);
    let (steps, lengths) = ([1, 2, 1, 3, 1], [8, 4, 3, 4, 2]);
    let map = tiled(&sizes, &strides, &steps, &lengths, 0, 8 * 2 * 3 * 2 * 2 * 2);
    let at = [0, 2, -1, 0, 1];
    let mut buffer = buffer();
    tensor(&map, 5, &at, "", false, &mut buffer)?;
    let mut place = COPY;
    for (e, d, c, b, a) in (0..2).flat_map(|e| {
        (0..2).flat_map(move |d| {
            (0..3).flat_map(move |c| (0..2).flat_map(move |b| (0..8).map(move |a| (e, d, c, b, a))))
        })
    }) {
        let position = [a, at[1] + 2 * b, at[2] + c, at[3] + 3 * d, at[4] + e];
        let inside = position
            .iter()
            .zip(sizes)
            .all(|(at, size)| (0..size as i32).contains(at));
        let bytes = position[0] * 2
            + position[1..]
                .iter()
                .zip(strides)
                .map(|(at, stride)| at * stride as i32)
                .sum::<i32>();
        let wanted = if inside { bytes as u16 / 2 + 1 } else { 0 };
        assert_eq!(half(&buffer, place), wanted, "{position:?}");
        place += 2;
    }
    Ok(())
}

#[test]
fn tiles_are_stored_inside_of_the_tensor_alone() -> Result<(), Fault> {
    for swizzle in [0, 3] {
        let map = tiled(&[70, 20], &[160], &[1, 1], &[64, 16], swizzle, 0);
        let mut loaded = buffer();
        let counted: Vec<_> = (0..2048u16)
            .flat_map(|half| (half + 20000).to_le_bytes())
            .collect();
        loaded[COPY..].copy_from_slice(&counted);
        let before = loaded.clone();
        tensor(&map, 2, &[20, 10], "", true, &mut loaded)?;
        for number in 0..(COPY - TENSOR) / 2 {
            let (x, y) = (number % 80, number / 80);
            let at = TENSOR + 2 * number;
            let wanted = if (20..70).contains(&x) && (10..20).contains(&y) {
                let (row, byte) = (y - 10, (x - 20) * 2);
                let piece = (byte / 16) ^ if swizzle == 3 { row % 8 } else { 0 };
                20000 + (row * 64 + piece * 8 + byte % 16 / 2) as u16
            } else {
                half(&before, at)
            };
            assert_eq!(half(&loaded, at), wanted, "{swizzle}: ({x}, {y})");
        }
    }
    Ok(())
}

#[test]
fn pixels_come_in_the_order_of_a_convolution() -> Result<(), Fault> {
    // 2 images of 5 by 6 pixels with 8 channels. The window has 3 by 3 pixels, with stride 2 and padding 1.
    let (c, w, h) = (8, 6, 5);
    let tensor_of = Tensor {
        data_type: 6,
        address: 0,
        sizes: &[8, 6, 5, 2],
        strides: &[16, 96, 480],
        steps: &[1, 2, 2, 1],
        interleave: 0,
        swizzle: 0,
        fill: 0,
    };
    let pixels = 14;
    let mut map = encode_im2col(&tensor_of, &[-1, -1], &[-1, -1], c, pixels)
        .unwrap_or_else(|error| panic!("{error}"));
    map[SIZE - 4..].copy_from_slice(&(pixels * c * 2).to_le_bytes());
    for (r, s) in [(0, 0), (1, 2), (2, 1)] {
        let mut buffer = buffer();
        tensor(
            &map,
            4,
            &[0, 1, -1, 0],
            &format!(", {{{s}, {r}}}"),
            false,
            &mut buffer,
        )?;
        // All outputs in order, from the second output of the first row.
        let outputs = (0..2).flat_map(|n| (0..3).flat_map(move |y| (0..3).map(move |x| (n, y, x))));
        for (pixel, (n, y, x)) in outputs.skip(1).take(pixels as usize).enumerate() {
            let (iy, ix) = (2 * y + r - 1, 2 * x + s - 1);
            let inside = (0..h).contains(&iy) && (0..w).contains(&ix);
            for channel in 0..c as i32 {
                let wanted = ((n * h + iy) * w + ix) * c as i32 + channel + 1;
                let wanted = if inside { wanted as u16 } else { 0 };
                let found = half(&buffer, COPY + (pixel * c as usize + channel as usize) * 2);
                assert_eq!(
                    found, wanted,
                    "({r}, {s}): pixel {pixel}, channel {channel}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn copies_that_do_not_fit_their_map_are_told() {
    let map = tiled(&[64, 20], &[128], &[1, 1], &[64, 16], 0, 0);
    let told = |map, rank, at: &[i32], more, words| {
        undefined(tensor(map, rank, at, more, false, &mut buffer()), words);
    };
    told(&map, 3, &[0, 0, 0], "", "does not fit");
    told(&map, 3, &[0, 0, 0], ", {0}", "does not fit");
    told(&[0; SIZE], 2, &[0, 0], "", "no tensor map");
    let huge = tiled(&[64, 2000], &[128], &[1, 1], &[64, 16], 0, 0);
    let outcome = tensor(&huge, 2, &[0, 500], "", false, &mut buffer());
    assert!(matches!(outcome, Err(Fault::Address { .. })), "{outcome:?}");
    let map = tiled(&[64], &[], &[1], &[64], 0, 0);
    let mut words: Vec<_> = map
        .as_chunks()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    let odd = "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+64], [%data, {0}], [%r2];";
    let outcome = run(1, odd, &mut words);
    assert!(
        matches!(outcome, Err(Fault::Misaligned { bytes: 128, .. })),
        "{outcome:?}"
    );
}
