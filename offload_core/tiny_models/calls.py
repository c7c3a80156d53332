"""Arguments that the calls of many families share."""

PICTURE = {"prompt": "a red fox", "height": 48, "width": 64, "num_inference_steps": 2}
VIDEO = PICTURE | {"num_frames": 5}
BY_32 = {"height": 64, "width": 96}  # for pipelines that want multiples of 32
SHORT_TEXT = {"max_sequence_length": 48}
UNGUIDED = {"guidance_scale": 1.0}
GUIDANCE = {"negative_prompt": "blurry", "guidance_scale": 5.0}
TRUE_CFG = {"negative_prompt": "blurry", "true_cfg_scale": 4.0}
VIDEOS = "num_videos_per_prompt"
LTX2_PLAIN = UNGUIDED | {
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "spatio_temporal_guidance_blocks": None,
}
