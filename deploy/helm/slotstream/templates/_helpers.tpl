{{/* Names and labels. */}}
{{- define "slotstream.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "slotstream.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "slotstream.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "slotstream.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The headless Service: it gives each pod a name. */}}
{{- define "slotstream.headless" -}}
{{- printf "%s-pods" (include "slotstream.fullname" .) -}}
{{- end -}}

{{- define "slotstream.selector" -}}
app.kubernetes.io/name: slotstream
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "slotstream.labels" -}}
{{ include "slotstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "slotstream.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default (index . 1).Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "slotstream.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsGroup }}
fsGroup: {{ .Values.runAsGroup }}
# Always, the default, would go through all samples at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Where pods go, and what they may: the same for all modes. */}}
{{- define "slotstream.podPlacement" -}}
automountServiceAccountToken: false
# Else a Service named vllm would set VLLM_PORT, which vLLM reads.
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "slotstream.podLabels" -}}
{{ include "slotstream.selector" . }}
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A pod starts again when its rules change; tokens and certificates are read without that. */}}
{{- define "slotstream.podAnnotations" -}}
{{- if .Values.retention.enabled }}
checksum/retention: {{ include "slotstream.retention" . | sha256sum }}
{{- end }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "slotstream.retention" -}}
free_bytes_target = {{ int64 .Values.retention.freeBytesTarget }}
{{- if eq .Values.mode "deployment" }}
bucket_bytes_max = {{ int64 .Values.retention.bucketBytesMax }}
{{- end }}

[default]
{{ ternary "delete_read_when_full" "delete_when_full" .Values.retention.keepUnread }} = true
failed_age_s_max = {{ int64 .Values.retention.failedAgeSeconds }}
{{- with .Values.retention.extraToml }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "slotstream.claim" -}}
metadata:
  name: data
  {{- with .Values.storage.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # A block device, local or attached. The server relies on rename, fsync and file locks: no object store behind FUSE.
  accessModes:
    {{- toYaml .Values.storage.accessModes | nindent 4 }}
  {{- with .Values.storage.className }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ .Values.storage.size }}
{{- end -}}

{{/* What the values together cannot be; the schema sees each for itself. */}}
{{- define "slotstream.check" -}}
{{- if eq .Values.mode "sidecar" -}}
{{- if not (semverCompare ">=1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "mode: sidecar needs Kubernetes 1.29 or later, for an init container that restarts; this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if ne (int .Values.server.workers) 1 -}}
{{- fail "server.workers must be 1 with mode: sidecar: only one process can listen on the engine's socket" -}}
{{- end -}}
{{- else if eq .Values.mode "deployment" -}}
{{- if not .Values.deployment.store -}}
{{- fail "deployment.store is missing: s3://BUCKET/PREFIX, where all servers store" -}}
{{- end -}}
{{- if ne (int .Values.server.workers) 1 -}}
{{- fail "server.workers must be 1 with mode: deployment: more servers take deployment.replicas" -}}
{{- end -}}
{{- if and .Values.retention.enabled (not .Values.retention.bucketBytesMax) -}}
{{- fail "retention.bucketBytesMax is missing: a bucket has no end of its own, so mode: deployment has to be told how much it may hold" -}}
{{- end -}}
{{- else if eq .Values.persistence "none" -}}
{{- fail "persistence: none is for mode: sidecar: a storage server without storage loses every sample with its pod" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name is missing: say which issuer signs the certificate" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.enabled) -}}
{{- fail "tls.certManager.enabled makes a certificate that nobody uses: set tls.enabled too" -}}
{{- end -}}
{{- end -}}
